"""The controller of the apps: one actor that carries out what `rollout` and `wants` decide."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from cluster.actors.head_actor import as_here
from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from serve_apps.controller.app import App
from serve_apps.controller.calls import Calls
from serve_apps.controller.changes import began, change, roll_back
from serve_apps.controller.decision import Decision
from serve_apps.controller.engine_keeper import EngineKeeper
from serve_apps.controller.execution import Execution
from serve_apps.controller.gateway_desk import GatewayDesk
from serve_apps.controller.gateway_table import GatewayTable
from serve_apps.controller.gateways import Gateways
from serve_apps.controller.model_names import follow_models
from serve_apps.controller.record import AppRecord
from serve_apps.controller.replica_desk import HOLD_S, ReplicaDesk
from serve_apps.controller.rollout import decide
from serve_apps.controller.serve_keeper import ServeKeeper, StartGateway
from serve_apps.controller.store import AppStore
from serve_apps.controller.threads import Threads
from serve_apps.controller.view import ClusterView, Lookout
from serve_apps.replica.watchdog import show_life
from serve_apps.routing.active import tell_active
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)

TICK_S = 0.5
BUSY_TICK_S = 0.1
"""Between two looks while something changes hands."""
LEAST_TICK_S = 0.02
"""Between two looks, whatever is told meanwhile."""
HANG_TIMEOUT_S = 15.0
"""A controller whose event loop stands still for so long is killed, and comes back."""
LATE_TICK_S = 3.0
"""A look that is so late was held up, and so may have been what others said meanwhile."""
HEAR_S = 15.0
"""How long a controller that comes back waits for the gateway and the replicas to be heard."""
SLOW_S = 0.5
"""How long a look waits for what is done about each app."""


class AppController:
    """The actor. What the apps are to be is kept in the storage; how they are is asked of Serve, the broker,
    the replicas and the gateways again and again, so that a controller that was killed goes on where it was.

    Args:
        info: the broker's facts about the cluster.
        start_gateway: see `StartGateway`.
    """

    def __init__(self, info: Mapping[str, Any], start_gateway: StartGateway) -> None:
        self._storage = str(info["storage"])
        self._store = AppStore(Storage(self._storage), info["name"], info["cluster_id"])
        records = self._store.load()
        self._apps = {name: App(record) for name, record in records.items() if not record.gone}
        self._ended = {name: record for name, record in records.items() if record.gone}
        """What became of apps that are not there any more."""
        self._gateways = Gateways()
        # Its number is higher than any that a former controller has given out.
        self._table = GatewayTable(int(time.time() * 1000))
        self._view = ClusterView(info.get("gateway_count", 1))
        self._desk = GatewayDesk(self._gateways, info.get("gateway_keys"))
        self._started_at = self._ticked_at = time.monotonic()
        self._informed = not self._apps
        """Everybody there is has been heard: before, a controller that comes back changes nothing."""
        self._threads = Threads()
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By app: held from reading its record until what follows from it has been remembered."""
        self._advancing: dict[str, asyncio.Task[None]] = {}
        """By app: deciding what is next for it, and doing it."""
        self._ticking: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._replicas = ReplicaDesk(self._apps, self._gateways, self._wake.set, self._tell_of_replica)
        self._calls = Calls(on_end=self._wake.set)
        self._lookout = Lookout(self._view, self._calls, self._threads)
        self._keeper = ServeKeeper(as_here(info), self._calls, self._threads, start_gateway)
        self._engines = EngineKeeper(
            self._view, self._calls, self._threads, self._replicas.call, info.get("parked_bytes")
        )
        self._execution = Execution(
            self._view, self._keeper, self._calls, self._threads, self._gateways, self._publish
        )

    async def apply(self, document: Mapping[str, Any]) -> int:
        """Change an app, or a new one, into this spec; returns the number of its newest revision.

        An update that is under way ends for it.

        Raises:
            RequestError: it is being taken down.
        """
        spec = AppSpec.from_json(document)
        async with self._changing[spec.name]:
            app = self._apps.get(spec.name)
            if app is not None and app.record.removed:
                raise RequestError(f"{spec.name} is being taken down; try again when it is gone")
            record = app.record if app is not None else self._new_record(spec.name)
            return await self._take(change(record, spec, time.time()))

    def _new_record(self, name: str) -> AppRecord:
        """That of an app which is not there, whose revisions go on from an earlier app's of that name."""
        ended = self._ended.get(name)
        return AppRecord(name, newest=ended.newest if ended is not None else 0)

    async def roll_back(self, name: str) -> int:
        """Have an app go back to what it was before; returns the number of its newest revision.

        Raises:
            RequestError: there is no such app, or nothing to go back to.
        """
        async with self._changing[name]:
            return await self._take(roll_back(self._known(name), time.time()))

    async def remove(self, name: str) -> None:
        """Take an app down; its requests are finished first.

        Raises:
            RequestError: there is no such app.
        """
        async with self._changing[name]:
            record = self._known(name)
            outcome = record.outcome
            if outcome is not None and outcome.status == "running":
                outcome = replace(outcome, status="failed", reason="the app was taken down")
            await self._take(replace(record, removed=True, update=None, successor=None, outcome=outcome))

    async def leave(self) -> list[str]:
        """Take every app down since the cluster ends; their names. Nothing is started any more: no Serve, and
        no gateway."""
        await self._keeper.leave()
        names = self._staying()
        self._table.leave(set(names))
        for name in names:
            await self.remove(name)
        return names

    async def bring_up(self) -> None:
        """Somebody waits for Serve and the gateway: what could not be started is tried again at once."""
        self._ensure_running()
        self._keeper.try_again()
        self._wake.set()

    async def serving(self) -> dict[str, Any]:
        """How Serve and the gateways are: see `ServeKeeper.describe`; and `gateways`: the node's id and the
        URL of each that is reached."""
        self._ensure_running()
        described = self._keeper.describe(self._view.serve, self._view.silence)
        described["failure"] = described["failure"] or self._desk.keys.failure or None
        places = self._gateways.places(time.monotonic())
        return {**described, "gateways": [{"node": node, "url": url} for node, url in places]}

    async def describe(self) -> dict[str, dict[str, Any]]:
        """Each app, by name: see `App.describe`; `settled` says that every gateway knows how it is now."""
        self._ensure_running()
        settled = self._informed and self._gateways.all_know(self._table.number, time.monotonic())
        return {
            name: {
                **app.describe(self._view.served),
                "note": self._keeper.words(self._view.silence) or None,
                "settled": settled and app.decided,
            }
            for name, app in sorted(self._apps.items())
        }

    async def outcome(self, name: str) -> dict[str, Any] | None:
        """How the last rollout of an app stands or ended, also after the app itself has gone."""
        app = self._apps.get(name)
        record = app.record if app is not None else self._ended.get(name)
        return None if record is None or record.outcome is None else vars(record.outcome)

    async def size(self, application: str, has: int | None = None) -> int | None:
        """How many replicas Serve is to have of an application, by what it counts; None: not known.

        It counts those that are lost until Ray declares their node dead.

        Args:
            has: how many it is to have so far.
        """
        self._ensure_running()
        app = self._replicas.app_of(application)
        size = None if app is None else app.standing(application, has)
        return None if size is None else size + self._view.lost.get(application, 0)

    async def follow(self, gateway: str, report: Mapping[str, Any]) -> dict[str, Any]:
        """A gateway says what it does, and is told the table: `number`, `poll_s`, `serve` (the id of the
        Serve that it is of), and `apps` if it is new; what `GatewayDesk.answer` says; and what the engines
        say of themselves: `engines`, by app and replica."""
        self._ensure_running()
        now = time.monotonic()
        if self._gateways.report(gateway, report, now):
            for name, seconds in report["first_token_s"].items():
                if name in self._apps:
                    self._apps[name].first_tokens.add(seconds, now)
        if any(report["waiting"].values()) or any(app.record.update for app in self._apps.values()):
            self._wake.set()  # somebody waits for a replica, or for a version
        answer: dict[str, Any] = {
            "number": report["seen"],
            "poll_s": BUSY_TICK_S,
            "serve": self._keeper.id,
            **self._desk.answer(gateway, report, self._apps, now),
        }
        if not self._informed:
            return answer
        answer["number"], answer["poll_s"] = self._table.number, BUSY_TICK_S if self._busy() else TICK_S
        if report["seen"] != self._table.number:
            answer["apps"] = self._table.apps
        answer["engines"] = {
            name: app.replicas.engine_figures(app.record.applications, now)
            for name, app in self._apps.items()
        }
        return answer

    async def table_news(self, seen: int, hold_s: float) -> bool:
        """See `GatewayTable.news`."""
        if not self._informed:  # it would be told nothing
            await asyncio.sleep(HOLD_S)
            return False
        return await self._table.news(seen, hold_s)

    async def desk(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call a method of the GatewayDesk; None: it is not known yet."""
        self._ensure_running()
        if method == "share" and not self._informed:
            return None
        answer = getattr(self._desk, method)(*arguments, **named)
        return await answer if isawaitable(answer) else answer

    async def report(self, application: str, replica: str, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """See `ReplicaDesk.report`."""
        self._ensure_running()
        return await self._replicas.report(application, replica, facts)

    async def gone(self, application: str, replica: str) -> None:
        """See `ReplicaDesk.gone`."""
        self._replicas.gone(application, replica)

    def _tell_of_replica(self, app: App, kind: str, facts: dict[str, Any]) -> None:
        if self._informed:  # to a controller that comes back all replicas are new
            self._tell(app, kind, facts)

    def _known(self, name: str) -> AppRecord:
        app = self._apps.get(name)
        if app is None or app.record.removed:
            names = self._staying()
            runs = f"these run: {', '.join(names)}" if names else "none runs"
            raise RequestError(f"no app '{name}' is served; {runs}")
        return app.record

    async def _take(self, record: AppRecord) -> int:
        """Make a record the app's, and remember it before anything is done about it."""
        self._ensure_running()
        await self._save(record)
        app = self._apps.get(record.name)
        before = None if app is None or app.record.update is None else app.record.update.number
        if app is None:
            app = self._apps[record.name] = App(record)
        app.record, app.decided = record, False
        if record.update is not None and record.update.number != before:
            self._tell(app, *began(record))
        self._wake.set()
        return record.newest

    async def _save(self, record: AppRecord) -> None:
        await asyncio.wrap_future(self._threads.store(record.name, lambda: self._store.save(record)))

    def _busy(self) -> bool:
        return any(app.busy for app in self._apps.values())

    def _ensure_running(self) -> None:
        """Start what goes on by itself; Ray starts an actor's event loop after its constructor."""
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick_for_ever())
        if self._living is None or self._living.done():
            self._living = asyncio.create_task(show_life(HANG_TIMEOUT_S))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._desk.keys.follow())
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._lookout.watch(self._wake.set))
        if self._following is None or self._following.done():
            following = follow_models(self._apps, self._changing, self._threads, self._storage, self._take)
            self._following = asyncio.create_task(following)

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                await self._tick()
            except Exception:
                # Serve or the broker may be restarting: what runs goes on, and the next look sees more.
                logger.exception("the apps could not be looked at")
            try:
                async with asyncio.timeout(BUSY_TICK_S if self._busy() else TICK_S):
                    await self._wake.wait()
                await asyncio.sleep(LEAST_TICK_S)
            except TimeoutError:
                pass
            self._wake.clear()

    async def _tick(self) -> None:
        if not await self._lookout.look(list(self._apps.values())):
            return  # without Serve's word nothing can be decided
        now = time.monotonic()
        self._view.count(list(self._apps.values()), now)
        self._keep_serve()
        if now - self._ticked_at > LATE_TICK_S:
            # It was this process that was silent, not the gateways and replicas.
            self._gateways.excuse(now)
            for app in self._apps.values():
                app.replicas.excuse(now)
        self._ticked_at = now
        self._desk.look(self._apps, now)
        if not self._informed and not self._hear(now):
            return
        for name, app in list(self._apps.items()):
            if name not in self._advancing:
                task = self._advancing[name] = asyncio.create_task(self._look_after(name, app))
                task.add_done_callback(lambda _, name=name: self._advancing.pop(name))  # type: ignore[misc]
        if self._advancing:
            # One whose storage is slow does not hold up the others.
            await asyncio.wait(self._advancing.values(), timeout=SLOW_S)
        self._publish()
        self._engines.clear_up(list(self._apps.values()))
        self._replicas.call()

    def _keep_serve(self) -> None:
        """Have Serve and the gateway there, whoever has ended them."""
        ours: dict[str, bool] = {}
        for app in self._apps.values():
            ours |= app.answering(self._view.served)
        others = self._view.gateway_nodes
        for kind, facts in self._keeper.keep(self._view.serve, ours, time.time(), others):
            for app in self._apps.values():
                self._tell(app, kind, facts)

    async def _look_after(self, name: str, app: App) -> None:
        try:
            async with self._changing[name]:
                await self._advance(name, app)
        except Exception:
            logger.exception("%s could not be looked after", name)

    async def _advance(self, name: str, app: App) -> None:
        """Decide what is next for an app, and do it."""
        now = time.time()
        seen = {
            revision.number: self._view.seen(
                app, revision, self._gateways, starts=("start", revision.application) in self._calls
            )
            for revision in app.record.revisions
        }
        if event := app.update_want(self._gateways, self._view.served, time.monotonic()):
            self._tell(app, *event)
            self._wake.set()  # the broker is to hear of it now
        if event := app.note_grant(self._view.granted, time.monotonic()):
            self._tell(app, *event)
        before = app.record
        decision = decide(before, seen, app.wants.want, now)
        if decision.record != before:
            await self._save(decision.record)
        self._carry_out(app, decision)
        if before.gone:
            # Its leases have been released by this look.
            self._ended[name] = app.record
            del self._apps[name]
            self._threads.forget(name)

    def _hear(self, now: float) -> bool:
        """Whether the gateway and every replica that runs have said how they are."""
        missing = self._view.unheard(list(self._apps.values()), now)
        heard = self._gateways.number_alive(now) > 0 and not missing
        if heard or now - self._started_at > HEAR_S:
            logger.warning("going on with %s; not heard of: %s", list(self._apps), missing)
            self._informed = True
        return self._informed

    def _carry_out(self, app: App, decision: Decision) -> None:
        app.take(decision)
        for kind, facts in decision.events:
            self._tell(app, kind, facts)
        there = {name for each in self._apps.values() for name in each.record.applications}
        self._engines.carry_out(app, decision)
        self._execution.carry_out(app, decision, there)

    def _publish(self) -> int:
        """Have gateways be told of the apps as they are now; the number of that."""
        now = time.monotonic()
        apps = list(self._apps.values())
        tell_active({name: app.active(name, now) for app in apps for name in app.record.applications})
        number = self._table.publish(
            {name: self._apps[name].table(self._view.served) for name in self._staying()}
        )
        for app in apps:
            app.engines.told(number)
        return number

    def _staying(self) -> list[str]:
        return [name for name, app in sorted(self._apps.items()) if not app.record.removed]

    def _tell(self, app: App, kind: str, facts: Mapping[str, Any]) -> None:
        logger.warning("%s: %s %s", app.record.name, kind, dict(facts))
        app.events.append({"kind": kind, **facts})
        name = app.record.name

        def write() -> None:
            try:
                self._store.event(name, kind, facts)
            except ShoalError as error:
                logger.warning("an event was not written: %s", error)

        # Nobody waits for it: what it tells of has happened, whatever the storage does.
        self._threads.store(name, write)
