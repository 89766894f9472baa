"""The path of logs."""

from collections.abc import AsyncIterator
from enum import Enum
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

from infra.api.control import Control
from infra.api.door import Door
from infra.api.errors import READ_ERRORS, STREAM_ERRORS
from infra.api.log_stream import LogQuery, LogSource, app_log_stream, job_log_stream
from infra.api.place import Place
from infra.api.roles import ApiCaller
from infra.app_logs import Wanted
from infra.job_output import JobOutput
from infra.node_logs import MOST_LINES, USUAL_LINES, node_logs


def add(router: APIRouter, control: Control, door: Door) -> None:
    """Add it."""
    reader = Annotated[ApiCaller, Depends(door.needs("read"))]
    tags: list[str | Enum] = ["logs"]

    def query(
        name: str,
        of: Annotated[Literal["app", "job"] | None, Query(description="Where both have the name.")] = None,
        follow: Annotated[bool, Query(description="Go on with what comes.")] = False,
        tail: Annotated[int | None, Query(ge=0, description="The last lines only.")] = None,
        replica: Annotated[str | None, Query(description="Of this replica of an app only.")] = None,
        request: Annotated[str | None, Query(description="About this request to an app only.")] = None,
        rank: Annotated[str | None, Query(description="Of this rank of a script, or `all`.")] = None,
    ) -> LogQuery:
        return LogQuery(name, of, follow, tail, replica, request, rank)

    def found(
        caller: reader,
        wanted: Annotated[LogQuery, Depends(query)],
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> JobOutput | Wanted:
        if last_event_id is not None:
            Place.read(last_event_id)  # a wrong one is told before the stream begins
        return LogSource(control.record, control.storage, control.submissions()).find(wanted)

    @router.get("/nodes/{node}/logs", responses=READ_ERRORS, tags=tags)
    def show_node_logs(
        caller: reader,
        node: str,
        file: Annotated[
            str | None, Query(description="One of them. Default: of the raylet, and GCS.")
        ] = None,
        tail: Annotated[
            int, Query(ge=0, le=MOST_LINES, description="Of each, the last lines.")
        ] = USUAL_LINES,
    ) -> dict[str, Any]:
        """What Ray's own processes on a node wrote: `files` that there are, and `lines`."""
        return node_logs(control.record.gcs_address, node, file, tail)

    @router.get("/logs/{name}", responses=STREAM_ERRORS, response_class=EventSourceResponse, tags=tags)
    async def stream_logs(
        wanted: Annotated[LogQuery, Depends(query)],
        source: Annotated[JobOutput | Wanted, Depends(found)],
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> AsyncIterator[ServerSentEvent]:
        """What a job printed, or an app's gateways and replicas, ended ones too: `line`, `note`; then `end`
        or `failed`. Who was cut off may be told lines again, with the `log` and `number` that they had."""
        if isinstance(source, JobOutput):
            stream = job_log_stream(source, wanted, last_event_id)
        else:
            stream = app_log_stream(control.record, source, wanted.follow, last_event_id)
        async for event in stream:
            yield event
