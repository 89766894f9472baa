"""Carries out what is decided about an app: applications of Serve, probes, what gateways send where."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from serve_apps.controller import serve_application
from serve_apps.controller.app import App
from serve_apps.controller.calls import Calls
from serve_apps.controller.decision import Decision
from serve_apps.controller.gateways import Gateways
from serve_apps.controller.probes import probe
from serve_apps.controller.record import Revision
from serve_apps.controller.serve_keeper import ServeKeeper
from serve_apps.controller.threads import Threads
from serve_apps.controller.view import ClusterView
from serve_apps.replica.handles import ReplicaHandles

logger = logging.getLogger(__name__)


class Execution:
    """Begins what is decided, and waits for none of it: the next look sees what came of it.

    Args:
        publish: has gateways be told of the apps as they are now; returns the number of that.
    """

    def __init__(
        self,
        view: ClusterView,
        keeper: ServeKeeper,
        calls: Calls,
        threads: Threads,
        gateways: Gateways,
        publish: Callable[[], int],
    ) -> None:
        self._view = view
        self._keeper = keeper
        self._calls = calls
        self._threads = threads
        self._gateways = gateways
        self._publish = publish
        self._handles = ReplicaHandles()

    def carry_out(self, app: App, decision: Decision, there: AbstractSet[str]) -> None:
        """Begin what is decided about an app; `there` are the applications of all apps."""
        self._handles.connect(there, self._keeper.id)
        for revision in decision.record.revisions:
            name, number = revision.application, revision.number
            size = decision.sizes.get(number, 0)
            if number in decision.delete:
                if name in self._view.served:
                    self.delete(name)
            elif size > 0 and name not in self._view.served and self._may_start(app, revision):
                self._calls.begin("start", name, self._start(app, revision, size))
            if number == decision.probe and number not in app.probes:
                self._calls.begin("probe", name, self._probe(app, revision))
        open_to = decision.traffic | decision.standby
        takes = {r.application for r in decision.record.revisions if r.number in open_to}
        closed = {r.application for r in decision.record.revisions} - takes
        self._gateways.route(takes, closed, self._publish())
        self._gateways.forget_but(there)

    def delete(self, application: str) -> None:
        """Have Serve end an application when its requests are finished."""
        self._calls.begin("delete", application, self._delete(application))

    async def _delete(self, application: str) -> None:
        await self._threads.call_serve(lambda: serve_application.delete(application))

    async def _start(self, app: App, revision: Revision, size: int) -> None:
        try:
            await self._threads.call_serve(
                lambda: serve_application.start(revision.spec, revision.application, size)
            )
        except serve_application.SERVE_GONE as error:
            # That is no fault of the app's: it is tried again when Serve is back.
            logger.warning("%s is not started, Serve ends: %s", revision.application, error)
        except Exception as error:
            logger.exception("%s could not be started", revision.application)
            app.failures[revision.number] = str(error)

    async def _probe(self, app: App, revision: Revision) -> None:
        handle = self._handles.find(revision.application)
        if handle is not None:
            app.probes[revision.number] = await probe(revision, handle)

    def _may_start(self, app: App, revision: Revision) -> bool:
        """Whether Serve is to be given a revision: one that failed, or is on its way out, is not."""
        if not self._keeper.takes:
            return False
        leaves = app.record.update is not None and app.record.update.back and revision is app.record.coming
        ends = ("delete", revision.application) in self._calls
        return not (leaves or ends or revision.number in app.failures)
