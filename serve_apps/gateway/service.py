"""What the gateway does with a request, apart from HTTP and from Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from serve_apps.gateway.access import Access, Caller
from serve_apps.gateway.app_table import AppTable, AppVersion
from serve_apps.gateway.backend import Backend
from serve_apps.gateway.metrics import GatewayMetrics
from serve_apps.gateway.options import GatewayOptions
from serve_apps.gateway.places import AskShare, Places
from serve_apps.gateway.repeats import Repeats
from serve_apps.gateway.traffic import Traffic
from serve_apps.http.accounts import InFlight
from serve_apps.openai.errors import bad_request, unavailable, unknown_model


class GatewayService:
    """The table of apps, the places in them, and the backend that generates.

    Args:
        access: who may ask for what. Default: everyone for everything.
        refresh: looks the apps up again now, takes the new table over and returns it; for a name that is
            not in the table.
        ask_share: see Places. Default: there is no other gateway.
    """

    def __init__(
        self,
        backend: Backend,
        refresh: Callable[[], Awaitable[AppTable]],
        access: Access | None = None,
        options: GatewayOptions | None = None,
        ask_share: AskShare | None = None,
    ) -> None:
        self.backend = backend
        self.access = access or Access()
        self.options = options or GatewayOptions()
        self.metrics = GatewayMetrics()
        self.load = InFlight()
        self.traffic = Traffic()
        self.repeats = Repeats(beside_front=self.options.alone)
        self.refresh = refresh
        self.places = Places(
            lambda app: self.traffic.table.capacity(app),
            ask_share,
            lambda app, filled: self.metrics.in_flight.labels(app).set(filled),
        )
        self._known = False

    @property
    def table(self) -> AppTable | None:
        """The apps; None until they were looked up for the first time."""
        return self.traffic.table if self._known else None

    @table.setter
    def table(self, table: AppTable | None) -> None:
        self._known = table is not None
        if table is None:
            return
        self.metrics.replicas(table.replicas)
        self.traffic.take_over(table)

    async def name(self, model: str | None, caller: Caller) -> str:
        """The app that a request asks, which may leave its name out where its caller sees a single one.

        Raises:
            ApiError: 400, it has to say which.
        """
        if model is not None:
            return model
        table = self.table or await self.refresh()
        seen = [name for name in table.names if caller.sees(name)]
        if len(seen) == 1:
            return seen[0]
        raise bad_request(
            f"'model' is required: {', '.join(seen) or 'none'} can be asked here.",
            param="model",
            code="missing_required_parameter",
        )

    async def find(self, app: str, caller: Caller) -> AppVersion:
        """The version of an app that takes a caller's next request.

        Raises:
            ApiError: 404 when there is no such app, or none that the caller may know of; 503 while it has
                never been ready, and when it goes with its cluster.
        """
        if not caller.sees(app):
            # Whether it is there is nothing that the answer may tell, nor the time that it takes.
            names = self.table.names if self.table else []
            raise unknown_model(app, [name for name in names if caller.sees(name)], some_hidden=True)
        version = self.table.find(app) if self.table else None
        if version is None:
            table = await self.refresh()
            version = table.find(app)
            if version is None and app in table.starting:
                raise unavailable(f"The model '{app}' is starting; try again in a moment.")
            if version is None and app in table.leaving:
                raise unavailable(f"'{app}' goes with its cluster, which is being ended; try again later.")
            if version is None:
                raise unknown_model(app, [name for name in table.names if caller.sees(name)])
        return version

    def hold_places(
        self, version: AppVersion, num_choices: int, param: str
    ) -> AbstractAsyncContextManager[None]:
        """Places for the choices of one request while they run or wait.

        Args:
            param: the request's field that asks for so many.

        Raises:
            ApiError: 400 when the app could never take so many at once, 429 when it cannot now.
        """
        app, config = version.spec.name, version.spec.config
        most = config.replicas.min * config.limits.batch + config.limits.queue
        if num_choices > most:
            raise bad_request(
                f"The request asks for {num_choices} answers; '{app}' takes at most {most} at once.",
                param=param,
            )
        return self.places.hold(app, num_choices)
