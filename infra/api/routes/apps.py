"""Paths about serving apps."""

from collections.abc import AsyncIterator
from enum import Enum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from cluster.config.sections.section import Name
from cluster.config.sections.serve import ServeAppConfig
from infra.api.batches import BatchBody
from infra.api.control import Control
from infra.api.door import Door
from infra.api.errors import CHANGE_ERRORS, READ_ERRORS, STREAM_ERRORS
from infra.api.roles import ApiCaller


def add(router: APIRouter, control: Control, door: Door) -> None:
    """Add them."""
    reader = Annotated[ApiCaller, Depends(door.needs("read"))]
    runner = Annotated[ApiCaller, Depends(door.needs("run"))]
    apps = control.apps
    tags: list[str | Enum] = ["apps"]

    @router.get("/apps", responses=READ_ERRORS, tags=tags)
    def list_all(caller: reader) -> list[dict[str, Any]]:
        """One row an app."""
        return control.view.apps()

    @router.put("/apps/{name}", responses=CHANGE_ERRORS, tags=tags)
    def serve_app(
        caller: runner, request: Request, name: Annotated[Name, Path()], config: ServeAppConfig
    ) -> dict[str, Any]:
        """Serve an app, or change the one that runs, by its section of the config; `number` is of the rollout
        that was begun, null where it runs so already."""
        with door.change(caller, request, name):
            return apps.apply(name, config)

    @router.delete("/apps/{name}", status_code=202, responses=CHANGE_ERRORS, tags=tags)
    def remove_app(caller: runner, request: Request, name: str) -> dict[str, Any]:
        """Take an app down once its requests are finished; it is gone when it is not listed any more."""
        with door.change(caller, request, name):
            return apps.remove(name)

    @router.post("/apps/{name}/rollback", status_code=202, responses=CHANGE_ERRORS, tags=tags)
    def roll_back_app(caller: runner, request: Request, name: str) -> dict[str, Any]:
        """Bring back what an app served before; `number` is of the rollout that was begun."""
        with door.change(caller, request, name):
            return apps.roll_back(name)

    def batch_begun(
        caller: runner, request: Request, name: Annotated[Name, Path()], body: BatchBody
    ) -> BatchBody:
        with door.change(caller, request, name):
            control.batches.check(name, body)
        return body

    @router.post("/apps/{name}/batch", responses=STREAM_ERRORS, response_class=EventSourceResponse, tags=tags)
    async def run_batch(
        name: Annotated[Name, Path()], body: Annotated[BatchBody, Depends(batch_begun)]
    ) -> AsyncIterator[ServerSentEvent]:
        """Answer the prompts of Parquet files with an app's model, which need not be served: `progress` and
        `note`; at last `end` with the result, or `failed`. It ends when nobody listens; the same request goes
        on where it ended."""
        async for event in control.batches.run(name, body):
            yield event

    @router.get(
        "/apps/{name}/rollouts/{number}/stream",
        responses=STREAM_ERRORS,
        response_class=EventSourceResponse,
        tags=tags,
    )
    async def stream_rollout(
        caller: reader,
        name: str,
        number: Annotated[int, Path(ge=0, le=2**31)],
        back: Annotated[bool, Query(description="It is one that goes back.")] = False,
    ) -> AsyncIterator[ServerSentEvent]:
        """How a rollout goes: `note` for each sentence, and at last `end` with the app's row, or `failed`."""
        async for event in apps.follow(name, number, back):
            yield event
