"""What Serve and the broker know of the apps, as of the last look."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import ray

from cluster.actors.named_actor import NamedActor
from cluster.errors import ShoalError
from cluster.ray_private import draining_nodes
from cluster.sharing.broker import BROKER_NAME
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand, Grant
from cluster.state.nodes import node_states
from serve_apps.controller import engine_devices, serve_state
from serve_apps.controller.app import App
from serve_apps.controller.calls import Calls
from serve_apps.controller.decision import Seen
from serve_apps.controller.engine_devices import EngineDevices
from serve_apps.controller.gateway_places import gateway_nodes
from serve_apps.controller.gateways import Gateways
from serve_apps.controller.ray_private import living_replicas
from serve_apps.controller.record import Revision
from serve_apps.controller.threads import Threads
from serve_apps.spec import GATEWAY, gateway_of

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""Between two looks while everything is as it should be."""
ENGINE_SILENT_S = 3.0
"""After so long its node is asked whether it is there."""
DOUBT_EVERY_S = 1.0
"""How often a node is asked that is in doubt for long: an engine may take minutes to start."""
WATCH_S = 2.0
"""The longest that the broker holds back its answer while it has no news."""
WATCH_TIMEOUT_S = 10.0
NO_LEASES_S = 0.5
SEE_S = 3.0
"""How long a look waits for Serve's word before the leases are renewed without it."""


class ClusterView:
    """Looks at Serve's applications, at where their replicas are, and at what the broker grants for them.

    Args:
        gateways: how many there are to be, see `gateway_nodes`.
    """

    def __init__(self, gateways: int | Literal["all"] = 1) -> None:
        self._gateways = gateways
        self.gateway_nodes: tuple[str, ...] = ()
        """Ids of the nodes that are to have a gateway beside the head."""
        self.serve = serve_state.ServeSeen()
        self.served: Mapping[str, serve_state.Served] = {}
        """By Serve application, the gateway's left out; those of its replicas are ready whose engine is."""
        self.lost: dict[str, int] = {}
        """By Serve application: its replicas on nodes that do not answer, which Serve takes for running until
        Ray declares the node dead; that takes a minute."""
        self.gone: set[str] = set()
        """The nodes that do not answer."""
        self.alive: Mapping[str, bool] = {}
        """The nodes that Ray says are alive, by id: False where one is about to go, or does not fit."""
        self.replicas: frozenset[str] | None = None
        """The ids of the replicas that Ray knows to be alive; None: not known."""
        self.devices: list[EngineDevices] = []
        """Those of all engines."""
        self.silence = ""
        """Why Serve did not answer, where it did not: what was known of it stays."""
        self.nodes: dict[str, tuple[str, ...]] = {}
        """By Serve application: the nodes of its engines, the oldest first; those that start included and,
        at the end, those that end; those that are lost left out."""
        self.grants: dict[str, tuple[str, ...]] = {}
        """By lease holder: the node of each engine that it allows."""
        self.coming: dict[str, tuple[str, ...]] = {}
        """By lease holder: nodes that are kept for it, until others have left."""
        self.told: dict[str, Grant] = {}
        """By lease holder: its grant as the broker told it last."""
        self._doubts: dict[str, float] = {}
        """The nodes in doubt that were there, and when they were asked."""
        self.has_news = False
        """The broker has other grants than it told."""
        self._demands: list[Demand] = []
        self._looked_at = -math.inf

    def is_due(self, apps: Sequence[App], now: float) -> bool:
        """Whether to look again now: at once while anything is not as the apps want it, else now and then.

        Serve and the broker are asked for much that does not change; on a busy node that costs requests time.

        Args:
            now: on the clock of `time.monotonic`.
        """
        if self.has_news or now - self._looked_at >= LOOK_EVERY_S or any(app.busy for app in apps):
            return True
        if self.silence or not self._has_gateways():
            return True
        ready = {name: served.ready for name, served in self.served.items()}
        if any(size != ready.get(name, 0) for app in apps for name, size in app.sizes.items()):
            return True
        short = any(app.granted < app.wants.want for app in apps)
        return short or self._demands != [demand for app in apps for demand in app.demands(self.nodes)]

    def _has_gateways(self) -> bool:
        """Whether there are all gateways that are to be, and no others."""
        wanted = {GATEWAY, *map(gateway_of, self.gateway_nodes)}
        there = self.serve.gateways
        return there.keys() == wanted and all(each.status == "running" for each in there.values())

    def see(self) -> None:
        """Look at Serve.

        Raises:
            RayError, RayServeException: it does not answer, or is just ending; what was known stays.
        """
        self.serve = serve_state.look()

    def count(self, apps: Sequence[App], now: float) -> None:
        """Take over how many replicas have an engine that answers, by what they say."""
        ready = {name: len(app.active(name, now)) for app in apps for name in app.record.applications}
        self.served = {
            name: _counted(served, ready.get(name, 0)) for name, served in self.serve.applications.items()
        }

    @property
    def granted(self) -> dict[str, int]:
        """By lease holder: engines."""
        return {holder: len(nodes) for holder, nodes in self.grants.items()}

    def look(self, apps: Sequence[App]) -> None:
        """See where engines are, and tell the broker what the apps want; leases of nobody are ended.

        Raises:
            ShoalError, RayError: Ray or the broker does not answer; what was known stays.
        """
        self.has_news = False
        # In this order: whose devices are seen, and who is not there afterwards, is gone.
        self.devices, self.replicas = engine_devices.look(), living_replicas()
        broker = BrokerClient()
        if self._gateways != 1:
            unfit = {*broker.misfits(), *draining_nodes()}
            self.gateway_nodes = gateway_nodes(self._gateways, node_states(), unfit, self.gateway_nodes)
        for app in apps:
            app.keep_homes(self.replicas)
        self._look_for_lost(broker, apps)
        nodes = _nodes_of(apps, self.devices, time.monotonic())
        self.nodes = {name: tuple(n for n in each if n not in self.gone) for name, each in nodes.items()}
        demands = [demand for app in apps for demand in app.demands(self.nodes)]
        for holder in {demand.holder for demand in self._demands} - {demand.holder for demand in demands}:
            broker.release(holder)
            for known in (self.grants, self.coming, self.told):
                known.pop(holder, None)
        self._demands = demands
        for demand in demands:
            grant = self.told[demand.holder] = broker.request(demand)
            self.grants[demand.holder], self.coming[demand.holder] = grant.nodes, grant.coming
        self.alive = broker.alive()
        self._looked_at = time.monotonic()
        for app in apps:
            app.note_shortage(self.granted, lambda demand, waited_s: broker.why_not(demand, round(waited_s)))

    def _look_for_lost(self, broker: BrokerClient, apps: Sequence[App]) -> None:
        """Ask the nodes of replicas and engines that are silent whether they are there."""
        now = time.monotonic()
        silent = self.unheard(apps, now)
        homes = {name: app.replicas.homes(name) for app in apps for name in app.record.applications}
        doubted = {node for name in silent for node in homes[name].values()}
        doubted |= {
            facts["engine_node"]
            for app in apps
            for name in app.record.applications
            for facts in app.replicas.said(name, now).values()
            if facts["state"] in ("starting", "ready") and facts["silent_s"] > ENGINE_SILENT_S
        }
        self.gone &= doubted
        self._doubts = {
            node: at for node, at in self._doubts.items() if node in doubted and now - at < DOUBT_EVERY_S
        }
        # The broker goes on asking those that it was asked about and that are gone.
        if new := doubted - self.gone - self._doubts.keys():
            self.gone |= set(broker.suspect(new))
            self._doubts |= dict.fromkeys(new - self.gone, now)
        for app in apps:
            app.engines.lost = frozenset(self.gone)
        self.lost = {name: sum(node in self.gone for node in homes[name].values()) for name in silent}

    def unheard(self, apps: Sequence[App], now: float) -> list[str]:
        """The Serve applications of which a replica that runs has not said how it is."""
        return [
            name
            for app in apps
            for name in {r.application for r in app.record.revisions}
            if len(app.replicas.said(name, now)) < _ready(self.serve.applications, name)
        ]

    def _failure(self, app: App, revision: Revision) -> str | None:
        """Why a revision cannot be started."""
        served = self.served.get(revision.application)
        if served is not None and served.failure is not None:
            return served.failure
        return app.failures.get(revision.number) or app.engines.failure(revision.application)

    def seen(self, app: App, revision: Revision, gateways: Gateways, *, starts: bool) -> Seen:
        """What is known of a revision of an app now.

        Args:
            starts: Serve is being given it, and may not have it yet.
        """
        served = self.served.get(revision.application)
        now = time.monotonic()
        reports = app.replicas.ready(revision.application, now)
        key = f"{revision.application} {revision.number}"
        others = sum(facts["revision"] != revision.number or facts["busy"] for facts in reports)
        unprepared = sum(facts["prepared"] != revision.number for facts in reports)
        refusals = [f["refusal"] for f in reports if f["refused"] == revision.number and f["refusal"]]
        return Seen(
            ready=served.ready if served else 0,
            held=len(self.nodes.get(revision.application, ())),
            granted=self.granted.get(revision.holder, 0),
            gone=served is None and not starts,
            failure=self._failure(app, revision),
            probe=app.probes.get(revision.number),
            drained=gateways.drained(revision.application, now),
            taken=gateways.taken(revision.application, now),
            requests=gateways.requests[key],
            errors=gateways.errors[key],
            prepared=0 if unprepared else len(reports),
            loaded=0 if others else len(reports),
            refusal=refusals[0] if refusals else None,
            shortage=app.shortage,
        )


def _counted(served: serve_state.Served, ready: int) -> serve_state.Served:
    """What Serve says of an application, by those of its replicas that have an engine."""
    status = served.status
    if status in ("running", "deploying", "unhealthy"):
        status = "running" if ready else "deploying"
    return replace(served, ready=ready, status=status)


def _nodes_of(
    apps: Sequence[App], devices: Sequence[EngineDevices], now: float
) -> dict[str, tuple[str, ...]]:
    """By Serve application, the nodes where its engines have devices, or are about to."""
    found: dict[str, tuple[str, ...]] = {}
    for app in apps:
        for name in app.record.applications:
            starts = {start.devices for key, start in app.engines.starts.items() if key[0] == name}
            meant = app.engines.devices(name, app.replicas.said(name, now))
            mine = {each.name: each.node for each in devices if each.application == name}
            order = [*meant, *sorted(mine.keys() - meant.keys())]
            nodes = [mine.get(each) or meant.get(each) for each in order if each in mine or each in starts]
            if there := tuple(node for node in nodes if node is not None):
                found[name] = there
    return found


def _ready(applications: Mapping[str, serve_state.Served], name: str) -> int:
    """How many replicas of an application run, as Serve has it."""
    return applications[name].ready if name in applications else 0


class Lookout:
    """Looks whenever it is due. The leases are kept also while Serve does not answer.

    Args:
        calls: what was begun at Serve.
    """

    def __init__(self, view: ClusterView, calls: Calls, threads: Threads) -> None:
        self._view = view
        self._calls = calls
        self._threads = threads
        self._seeing: asyncio.Task[None] | None = None

    async def watch(self, on_news: Callable[[], None]) -> None:
        """Call whenever the broker has other grants than it told, for ever."""
        broker = NamedActor(BROKER_NAME)
        while True:
            told = dict(self._view.told)
            try:
                news = bool(told) and await broker.ask(
                    "watch", told, WATCH_S, timeout_s=WATCH_TIMEOUT_S, once=True
                )
            except (ShoalError, ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("the broker is not watched: %s", error)
                await asyncio.sleep(WATCH_S)
                continue
            if news:
                self._view.has_news = True
                on_news()
            elif not told:
                await asyncio.sleep(NO_LEASES_S)

    async def look(self, apps: Sequence[App]) -> bool:
        """Look, unless it is too early; whether Serve was seen as it is since its last call has returned.

        Raises:
            ShoalError, RayError: see `ClusterView.look`.
        """
        view = self._view
        if self._seeing is None:
            # Serve is asked after a call has returned, before anything is decided without that call in mind.
            returned = self._calls.take_ended()
            # What a replica had that is gone is to be used again at once.
            changed = await self._threads.look(living_replicas) != view.replicas
            if not (changed or returned or self._calls or view.is_due(apps, time.monotonic())):
                return True
            self._seeing = asyncio.create_task(self._threads.see(view.see))
        seeing = self._seeing
        await asyncio.wait([seeing], timeout=SEE_S)
        if not seeing.done():
            view.silence = f"nothing for {SEE_S:g} s"
        else:
            self._seeing = None
            error = seeing.exception()
            view.silence = "" if error is None else str(error).strip().partition("\n")[0] or repr(error)
        if view.silence:
            logger.warning("Serve does not answer: %s", view.silence)
        await self._threads.look(lambda: view.look(apps))
        return not view.silence
