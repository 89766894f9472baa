"""What the gateway says of itself to who runs it: whether it lives, is ready, how much it has to do."""

from __future__ import annotations

from enum import Enum

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from cluster.version import version
from serve_apps.gateway.access import credential
from serve_apps.gateway.document import ANY_ROUTE, metrics_page, refusals
from serve_apps.gateway.service import GatewayService
from serve_apps.http.behind_front import DIRECT
from serve_apps.http.request_record import current_record
from serve_apps.openai.answers import AppAnswer, HealthAnswer, LoadAnswer, ReadyAnswer, VersionAnswer
from serve_apps.openai.errors import ApiError

_TAGS: list[str | Enum] = ["operations"]


def add_operations(api: FastAPI, service: GatewayService) -> None:
    """Add the routes; what tells of apps tells a caller of those only that its key opens."""
    any_route = refusals(ANY_ROUTE)
    for_observers = refusals((401, 403, *ANY_ROUTE))

    def check_observer(request: Request) -> None:
        address = request.client.host if request.client is not None else None
        service.access.observer(credential(request.headers), address, direct=DIRECT in request.scope)

    @api.get("/health", response_model=HealthAnswer, responses=any_route, tags=_TAGS)
    async def health() -> HealthAnswer:
        """The gateway lives."""
        return {"status": "ok"}

    @api.get("/ping", response_class=Response, responses=any_route, tags=_TAGS)
    async def ping() -> Response:
        """The gateway lives; without a body, as SageMaker asks."""
        return Response()

    @api.post("/ping", response_class=Response, responses=any_route, tags=_TAGS, operation_id="ping_by_post")
    async def ping_by_post() -> Response:
        """The gateway lives; without a body, as SageMaker asks."""
        return Response()

    @api.get("/version", response_model=VersionAnswer, responses=any_route, tags=_TAGS)
    async def shoal_version() -> VersionAnswer:
        """Shoal's version."""
        return {"version": version()}

    @api.get("/ready", response_model=ReadyAnswer, responses=any_route, tags=_TAGS)
    async def ready(request: Request) -> Response:
        """200 when every app that the caller may ask could answer now, else 503; without a key, where the
        gateway has keys, every app counts and none is named."""
        caller = service.access.anyone(credential(request.headers))
        table = service.table
        nobody = not caller.sees_all and caller.key is None
        waiting = table.not_ready() if table is not None else []
        waiting = [app for app in waiting if nobody or caller.sees(app)]
        if table is not None and not waiting:
            answer: ReadyAnswer = {"status": "ready"}
            if not nobody:
                answer["apps"] = [app for app in table.names if caller.sees(app)]
            return JSONResponse(answer)
        named = f"Not ready: {', '.join(waiting)}." if not nobody else "Not every app is ready."
        what = named if waiting else "The apps are not known yet."
        error = ApiError(503, what, kind="server_error", code="not_ready")
        current_record().error = error.code
        more = {} if nobody else {"waiting_for": waiting}
        return JSONResponse({**error.body(), **more}, 503, {"Retry-After": "1"})

    @api.get("/metrics", response_class=Response, responses={**for_observers, **metrics_page()}, tags=_TAGS)
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus."""
        check_observer(request)
        page, form = service.metrics.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": form})

    @api.get("/load", response_model=LoadAnswer, responses=for_observers, tags=_TAGS)
    async def load(request: Request) -> LoadAnswer:
        """How many requests ask a model now, those included that wait."""
        check_observer(request)
        return {"server_load": service.load.number}

    @api.get("/apps", response_model=dict[str, AppAnswer], responses=refusals((401, *ANY_ROUTE)), tags=_TAGS)
    async def apps(request: Request) -> dict[str, AppAnswer]:
        """What each app was deployed with, and whether it is ready; looked up at this moment."""
        service.access.admin(credential(request.headers))
        table = await service.refresh()
        return {
            app: {"spec": versions[0].spec.as_json(), "ready": versions[0].ready}
            for app, versions in table.versions.items()
        }
