"""A job as a stream: what its logs tell, as it comes, from wherever whoever follows it has come to."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from infra.api.place import NOW, Place, place_now
from infra.job_logs import JobEntry, JobLogs
from train_jobs.records.job_status import RAY_ENDED

LOOK_EVERY_S = 0.3
DRIVER_EVERY_S = 2.0


async def job_stream(
    run: Storage,
    job: str,
    after: str | None,
    driver_status: Callable[[str | None], str | None],
    result: Callable[[], dict[str, Any]],
) -> AsyncIterator[ServerSentEvent]:
    """What a job's logs tell, until it has ended: `event`, `metric` and `printed`; at last `end`, with the
    document that `shoal train` returns. `note` is a sentence about the stream itself.

    Args:
        run: the job's directory.
        after: the place that is known; None from the start.
        driver_status: Ray's status of a submission.
        result: the document of a job that has ended.
    """
    logs, place, noted = JobLogs(run, job), Place(), ""
    past = Place() if after in (None, NOW) else Place.read(str(after))
    if after == NOW:
        past = await run_in_threadpool(place_now, run, job)
    next_look = time.monotonic() + DRIVER_EVERY_S
    while True:
        ended = False
        try:
            if time.monotonic() >= next_look:
                # Before the look at what it wrote.
                status = await run_in_threadpool(driver_status, logs.summary.submission_id)
                ended = status in RAY_ENDED
                next_look = time.monotonic() + DRIVER_EVERY_S
            entries: list[JobEntry] = await run_in_threadpool(lambda: list(logs.new()))
            noted = ""
        except ShoalError as error:
            if str(error) != noted:
                noted = str(error)
                yield ServerSentEvent(event="note", data={"text": f"{error}; looking again"})
            await anyio.sleep(LOOK_EVERY_S)
            continue
        for kind, entry in entries:
            if place.passes(kind, past):
                yield ServerSentEvent(event=kind, id=str(place), data=entry)
        if logs.summary.ended or ended:
            yield ServerSentEvent(event="end", id=str(place), data=await run_in_threadpool(result))
            return
        await anyio.sleep(LOOK_EVERY_S)
