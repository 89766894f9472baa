"""Has engines where the broker has granted devices, and takes devices back from whoever is gone."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from serve_apps.controller import engine_devices
from serve_apps.controller.app import App
from serve_apps.controller.app_engines import EngineStart
from serve_apps.controller.calls import Calls
from serve_apps.controller.decision import Decision
from serve_apps.controller.engine_devices import EngineDevices
from serve_apps.controller.engine_places import place
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
    """

    def __init__(
        self, view: ClusterView, calls: Calls, threads: Threads, on_order: Callable[[], None]
    ) -> None:
        self._view = view
        self._calls = calls
        self._threads = threads
        self._on_order = on_order

    def carry_out(self, app: App, decision: Decision) -> None:
        """Begin what leads to as many engines of each revision as are decided."""
        now = time.monotonic()
        by_holder: dict[str, list[Revision]] = {}
        for revision in decision.record.revisions:
            by_holder.setdefault(revision.holder, []).append(revision)
        for holder, revisions in by_holder.items():
            room = Counter(self._view.grants.get(holder, ()))
            room -= Counter(n for each in revisions for n in self._view.nodes.get(each.application, ()))
            for application in {revision.application for revision in revisions}:
                spec = next(r.spec for r in revisions if r.application == application)
                sizes = [
                    decision.sizes[r.number]
                    for r in revisions
                    if r.application == application and r.number in decision.sizes
                ]
                if not sizes:
                    continue
                said = app.said(application, now)
                mine = Counter(self._view.nodes.get(application, ()))
                granted = list((room + mine).elements())
                may_start = self._may_start(app, application, now)
                changes = place(
                    max(sizes),
                    app.engines.placed(application, said),
                    app.engines.standing_by(application, said) if may_start else [],
                    granted,
                )
                for replica, node in changes.starts:
                    room[node] -= 1
                    self._calls.begin(
                        f"devices of {replica}",
                        application,
                        self._start(app, application, replica, node, spec.replica_resources),
                    )
                for replica in changes.ends:
                    app.engines.end(application, replica)
                if changes.ends:
                    self._on_order()

    def _may_start(self, app: App, application: str, now: float) -> bool:
        return application not in app.leaving and app.engines.may_start(application, now)

    async def _start(
        self, app: App, application: str, replica: str, node: str, resources: Mapping[str, float]
    ) -> None:
        start = EngineStart(node, engine_devices.new_name(application, replica))
        app.engines.starts[application, replica] = start
        await self._threads.call_serve(lambda: engine_devices.reserve(start.devices, node, resources))
        self._on_order()

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

    def _is_orphan(
        self, devices: EngineDevices, app: App | None, living: Collection[str], now: float
    ) -> bool:
        if app is None or devices.replica not in living or devices.node in self._view.gone:
            return True
        if (devices.application, devices.replica) in app.engines.gone:
            return True
        home = app.homes(devices.application).get(devices.replica)
        if home in self._view.gone and app.silence(devices.application, devices.replica, now) > MISSED_S:
            return True  # Ray takes it for alive for a while still
        start = app.engines.starts.get((devices.application, devices.replica))
        if start is not None and start.devices == devices.name:
            return False
        said = app.said(devices.application, now).get(devices.replica)
        return said is not None and said["devices"] != devices.name

    async def _free(self, name: str) -> None:
        await self._threads.call_serve(lambda: engine_devices.free(name))
