"""Paths about the cluster, its nodes, and who holds what."""

from collections.abc import AsyncIterator
from enum import Enum
from importlib import metadata
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from cluster.version import version
from infra.api import API_VERSION
from infra.api.control import Control
from infra.api.door import Door
from infra.api.errors import CHANGE_ERRORS, READ_ERRORS, STREAM_ERRORS
from infra.api.event_stream import MOST_EVENTS, PLACE, event_stream, place_of
from infra.api.roles import ApiCaller

After = Annotated[str | None, Query(pattern=PLACE, description="EPOCH.SEQ of an event: those after it.")]


def add(router: APIRouter, control: Control, door: Door) -> None:
    """Add them."""
    reader = Annotated[ApiCaller, Depends(door.needs("read"))]
    admin = Annotated[ApiCaller, Depends(door.needs("admin"))]
    tags: list[str | Enum] = ["cluster"]

    @router.get("/version", responses=READ_ERRORS, tags=tags)
    def show_version(caller: reader) -> dict[str, Any]:
        """Which cluster and which versions answer, and who asks."""
        asks = {"name": caller.name, "role": caller.role}
        return {
            "cluster": control.name,
            "api": API_VERSION,
            "shoal": version(),
            "ray": metadata.version("ray"),
            "caller": asks,
        }

    @router.get("/cluster", responses=READ_ERRORS, tags=tags)
    def show_cluster(caller: reader) -> dict[str, Any]:
        """What `shoal status --json` prints: nodes, leases, jobs, apps; `notes` says what does not answer."""
        return control.view.status()

    @router.get("/nodes", responses=READ_ERRORS, tags=tags)
    def list_nodes(caller: reader) -> list[dict[str, Any]]:
        """Every node with what it has and uses, and why it is not used."""
        return control.view.nodes()

    @router.post("/nodes/{node}/forgive", responses=CHANGE_ERRORS, tags=tags)
    def forgive_node(caller: admin, request: Request, node: str) -> dict[str, Any]:
        """Trust a node again that is avoided because jobs failed there."""
        with door.change(caller, request, node):
            return {"node": node, "was_avoided": control.view.forgive(node)}

    @router.get("/leases", responses=READ_ERRORS, tags=tags)
    def list_leases(caller: reader) -> list[dict[str, Any]]:
        """Who holds how many of what they want."""
        return control.view.leases()

    @router.get("/explain/{name:path}", responses=READ_ERRORS, tags=tags)
    def explain(caller: reader, name: str) -> dict[str, Any]:
        """Why a job or an app waits, or has the devices it has."""
        return control.view.explain(name)

    @router.get("/events", responses=READ_ERRORS, tags=tags)
    def list_events(
        caller: reader, after: After = None, most: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 1000
    ) -> list[dict[str, Any]]:
        """What has changed hands and why: the last of that, or what came after an event; the oldest first."""
        return control.view.events(place_of(after), most)

    @router.get("/events/stream", responses=STREAM_ERRORS, response_class=EventSourceResponse, tags=tags)
    async def stream_events(
        caller: reader,
        after: After = None,
        last_event_id: Annotated[str | None, Header(pattern=PLACE)] = None,
        first: Annotated[int, Query(ge=0, le=MOST_EVENTS, description="Past events at the start.")] = 0,
    ) -> AsyncIterator[ServerSentEvent]:
        """The same as it happens: `event` with its EPOCH.SEQ as id, and `leases` when they have changed."""
        async for event in event_stream(control.view, last_event_id or after, first):
            yield event
