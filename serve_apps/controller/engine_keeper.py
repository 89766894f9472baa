"""Has engines where the broker has granted devices, and takes devices back from whoever is gone."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from serve_apps.controller import engine_devices
from serve_apps.controller.app import App
from serve_apps.controller.app_engines import EngineStart
from serve_apps.controller.calls import Calls
from serve_apps.controller.decision import Decision
from serve_apps.controller.engine_devices import EngineDevices
from serve_apps.controller.engine_places import StandingBy, pair, place
from serve_apps.controller.parking import Parked, too_many
from serve_apps.controller.record import Revision
from serve_apps.controller.threads import Threads
from serve_apps.controller.view import ClusterView

logger = logging.getLogger(__name__)

MISSED_S = 25.0
"""An engine has missed its replica by then, whose node is lost, and has ended (cluster.node.dial)."""


class EngineKeeper:
    """Carries out what follows from the sizes that are decided.

    Args:
        on_order: called when a replica is to do something.
        parked_bytes: what the parked engines of a node may take; 0: none is parked; None: what the node says.
    """

    def __init__(
        self,
        view: ClusterView,
        calls: Calls,
        threads: Threads,
        on_order: Callable[[], None],
        parked_bytes: int | None = None,
    ) -> None:
        self._view = view
        self._calls = calls
        self._threads = threads
        self._on_order = on_order
        self._parked_bytes = parked_bytes

    def carry_out(self, app: App, decision: Decision) -> None:
        """Begin what leads to as many engines of each revision as are decided."""
        now = time.monotonic()
        by_holder: dict[str, list[Revision]] = {}
        for revision in decision.record.revisions:
            by_holder.setdefault(revision.holder, []).append(revision)
        for holder, revisions in by_holder.items():
            names = list(dict.fromkeys(revision.application for revision in revisions))
            mine = {name: Counter(self._view.nodes.get(name, ())) for name in names}
            granted = Counter(self._view.grants.get(holder, ()))
            self._take_up(app, revisions, granted, mine)
            for application in names:
                here = [revision for revision in revisions if revision.application == application]
                sizes = [decision.sizes[each.number] for each in here if each.number in decision.sizes]
                if not sizes:
                    continue
                said = app.replicas.said(application, now)
                engines = app.engines.placed(application, said)
                changes = place(
                    max(sizes),
                    engines,
                    self._standing_by(app, application, now),
                    list((granted - _all_but(application, mine)).elements()),
                    dead={engine.node for engine in engines} - self._view.alive.keys(),
                )
                places = {engine.replica: engine.node for engine in engines}
                for replica, node in changes.starts:
                    mine[application][node] += 1
                    self._reserve(application, self._begin(app, application, replica, node), here[0])
                for replica in changes.ends:
                    park = self._park(app, application, places[replica])
                    app.engines.end(application, replica, park=park)
                if changes.ends:
                    self._on_order()
            self._start_early(app, decision, holder, names)

    def _park(self, app: App, application: str, node: str) -> dict[str, Any] | None:
        """How an engine of it is parked; None: it is not."""
        if self._parked_bytes == 0 or not self._is_to_stay(app, application, node):
            return None
        return {"most_bytes": self._parked_bytes}

    def _is_to_stay(self, app: App, application: str, node: str) -> bool:
        """Whether an engine of it may be wanted again on this node."""
        serving = app.record.serving
        leaves = app.record.removed or app.record.update is not None or not self._view.alive.get(node)
        return not leaves and serving is not None and serving.application == application

    def _take_up(
        self,
        app: App,
        revisions: Sequence[Revision],
        granted: Counter[str],
        mine: Mapping[str, Counter[str]],
    ) -> None:
        """Make those early engines the app's whose devices are granted now."""
        room = granted - _all_but(None, mine)
        for (application, replica), node in list(app.engines.early.items()):
            leaves = (application, replica) in app.engines.ends
            if application in mine and room[node] > 0 and not leaves:
                del app.engines.early[application, replica]
                room[node] -= 1
                mine[application][node] += 1
                if start := app.engines.starts.get((application, replica)):
                    revision = next(each for each in revisions if each.application == application)
                    self._reserve(application, start, revision)

    def _start_early(self, app: App, decision: Decision, holder: str, names: Sequence[str]) -> None:
        """Have engines get ready for devices that are kept for the app until others have left."""
        coming = Counter(self._view.coming.get(holder, ()))
        for key, node in app.engines.early.items():
            if key[0] not in names or key in app.engines.ends:
                continue
            if coming[node] > 0:
                coming[node] -= 1
            else:
                app.engines.end(*key)
                self._on_order()
        serving = decision.record.serving
        if serving is None or serving.holder != holder or decision.record.update is not None:
            return
        application = serving.application
        free = self._standing_by(app, application, time.monotonic())
        for replica, node in pair(free or (), list((+coming).elements())):
            app.engines.early[application, replica] = node
            self._begin(app, application, replica, node, early=True)

    def _standing_by(self, app: App, application: str, now: float) -> list[StandingBy] | None:
        """The replicas that may have an engine now; None: none may, see `place`."""
        if not self._may_start(app, application, now):
            return None
        return app.engines.standing_by(application, app.replicas.said(application, now))

    def _begin(
        self, app: App, application: str, replica: str, node: str, *, early: bool = False
    ) -> EngineStart:
        """Have a replica get an engine ready, up to where that needs its devices."""
        start = EngineStart(
            node, engine_devices.new_name(application, replica), early, parks=self._parked_bytes != 0
        )
        app.engines.starts[application, replica] = start
        self._on_order()
        return start

    def _reserve(self, application: str, start: EngineStart, revision: Revision) -> None:
        work = self._ask_for_devices(start, revision.spec.replica_resources)
        self._calls.begin(f"devices {start.devices}", application, work)

    def _may_start(self, app: App, application: str, now: float) -> bool:
        return application not in app.leaving and app.engines.may_start(application, now)

    async def _ask_for_devices(self, start: EngineStart, resources: Mapping[str, float]) -> None:
        await self._threads.call_serve(lambda: engine_devices.reserve(start.devices, start.node, resources))

    def clear_up(self, apps: Collection[App]) -> None:
        """Take back the devices of replicas that are gone, or have no engine and are to have none."""
        if self._view.replicas is None:
            return
        now = time.monotonic()
        owners = {name: app for app in apps for name in app.record.applications}
        for devices in self._view.devices:
            if self._is_orphan(devices, owners.get(devices.application), self._view.replicas, now):
                logger.warning("free again: %s", devices.name)
                self._calls.begin(f"free {devices.name}", devices.application, self._free(devices.name))
        for app in apps:
            self._end_vain_starts(app, now)
        self._bound_parked(apps, now)

    def _bound_parked(self, apps: Collection[App], now: float) -> None:
        """End parked engines that nobody can wake any more, and the oldest of a node that has too many."""
        parked = []
        for app in apps:
            for application in app.record.applications:
                loaded = app.loaded_by(application)
                for replica, facts in app.replicas.said(application, now).items():
                    if (one := facts["parked"]) is not None:
                        is_wanted = (
                            loaded is not None
                            and one["revision"] == loaded.number
                            and self._is_to_stay(app, application, one["node"])
                        )
                        parked.append(Parked((app.record.name, application, replica), is_wanted, **one))
        by_name = {app.record.name: app for app in apps}
        for name, application, replica in too_many(parked):
            discards = by_name[name].engines.discards
            if (application, replica) not in discards:
                discards.add((application, replica))
                self._on_order()

    def _end_vain_starts(self, app: App, now: float) -> None:
        """End engines that start for devices which nobody asks for: a controller that died was about to."""
        there = {devices.name for devices in self._view.devices}
        for application in app.record.applications:
            for replica, facts in app.replicas.said(application, now).items():
                known = (application, replica) in app.engines.starts
                if facts["state"] == "starting" and not known and facts["devices"] not in there:
                    app.engines.end(application, replica)
                    self._on_order()

    def _is_orphan(
        self, devices: EngineDevices, app: App | None, living: Collection[str], now: float
    ) -> bool:
        if app is None or devices.replica not in living or devices.node in self._view.gone:
            return True
        if (devices.application, devices.replica) in app.engines.gone:
            return True
        home = app.replicas.homes(devices.application).get(devices.replica)
        if (
            home in self._view.gone
            and app.replicas.silence(devices.application, devices.replica, now) > MISSED_S
        ):
            return True  # Ray takes it for alive for a while still
        start = app.engines.starts.get((devices.application, devices.replica))
        if start is not None and start.devices == devices.name:
            return False
        said = app.replicas.said(devices.application, now).get(devices.replica)
        return said is not None and said["devices"] != devices.name

    async def _free(self, name: str) -> None:
        await self._threads.call_serve(lambda: engine_devices.free(name))


def _all_but(application: str | None, nodes: Mapping[str, Counter[str]]) -> Counter[str]:
    """The nodes of all applications together but this one."""
    return sum((each for name, each in nodes.items() if name != application), Counter())
