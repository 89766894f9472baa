"""The control API as HTTP."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from cluster.version import version
from infra.api import API_VERSION, PREFIX
from infra.api.control import Control
from infra.api.door import Door
from infra.api.errors import add_handlers
from infra.api.routes import admin, apps, jobs, logs, models, nodes


def build_api(control: Control) -> FastAPI:
    """The HTTP service of a cluster."""
    api = FastAPI(
        title="Shoal control API",
        version=str(API_VERSION),
        description=f"Shoal {version()}: nodes, jobs, apps and models of the cluster {control.name}.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
    )
    add_handlers(api)
    door = Door(control)
    router = APIRouter(prefix=PREFIX)
    for part in (nodes, jobs, logs, apps, models, admin):
        part.add(router, control, door)
    api.include_router(router)

    @api.get("/health", include_in_schema=False)
    def health() -> dict[str, str]:
        """Whether the service is there; for whoever watches it."""
        return {"status": "ok"}

    return api
