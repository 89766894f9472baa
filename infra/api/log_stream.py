"""Logs as a stream: of a job, or of an app's processes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

import anyio
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.state.record import ClusterRecord
from infra.api.app_log_process import question
from infra.api.place import Place
from infra.app_logs import AppLogs, Wanted
from infra.job_output import JobOutput
from train_jobs.driver.submission import Submissions
from train_jobs.records.job_status import job_ids
from train_jobs.records.listing import find_job

LOOK_EVERY_S = 1.0
MOST_PROCESSES = 32
"""So many may read the logs of apps at once; each has a process."""
PLACE_EVERY_S = 0.5
"""Of an app with many processes a place is long."""
MOST_LINE_BYTES = 16 * 2**20
_reading = 0


@dataclass(frozen=True)
class LogQuery:
    """Which lines somebody wants.

    Attributes:
        name: an app, or a job: its id, or a name for its newest one.
        of: what the name is of, where an app and a job have it.
        tail: the last lines only (of an app: of each process).
        replica, request: of this replica of an app, or about this request, only.
        rank: what this rank of a script printed, or `all` of them.
    """

    name: str
    of: Literal["app", "job"] | None = None
    follow: bool = False
    tail: int | None = None
    replica: str | None = None
    request: str | None = None
    rank: str | None = None


class LogSource:
    """Finds out what a name means.

    Args:
        record: the cluster's, as seen from here.
    """

    def __init__(self, record: ClusterRecord, storage: Storage, submissions: Submissions) -> None:
        self._record, self._storage, self._submissions = record, storage, submissions

    def find(self, query: LogQuery) -> JobOutput | Wanted:
        """The output of a job, or which lines of an app.

        Raises:
            RequestError: nothing has this name, or both have.
        """
        only_app = query.of == "app" or query.replica is not None or query.request is not None
        job = None if only_app else self._job(query.name)
        apps = [] if query.of == "job" else AppLogs(self._record, joined=True).apps()
        if job is not None and query.name in apps:
            raise RequestError(f"{query.name} is an app and the name of a job; say which with --app or --job")
        if job is not None:
            return JobOutput(self._storage, job, query.rank, self._submissions, self._record.name)
        if query.name in apps:
            wanted = Wanted(query.name, query.replica, query.request, query.tail)
            AppLogs(self._record, joined=True).sources(wanted)  # a replica that is not there is told at once
            return wanted
        what = "no app" if only_app else "no job" if query.of == "job" else "neither an app nor a job"
        there = []
        if query.of != "job":
            there.append(f"the apps are {', '.join(apps)}" if apps else "nothing has been served")
        if not only_app:
            jobs = job_ids(self._storage)[-10:]
            there.append(f"the last jobs are {', '.join(jobs)}" if jobs else "there are no jobs yet")
        raise RequestError(f"there is {what} {query.name!r}; {'; '.join(there)}")

    def _job(self, name: str) -> str | None:
        try:
            return find_job(self._storage, name)
        except RequestError:
            return None


async def job_log_stream(
    output: JobOutput, query: LogQuery, after: str | None
) -> AsyncIterator[ServerSentEvent]:
    """`line` for each line that was printed; `note`; at last `end`, with `sentences`.

    A line has the key of its `log` and its `number` there: who was cut off may be told some of them again.
    """
    past = Place() if after is None else Place.read(after)
    place, first = Place(), after is None
    for note in output.notes if first else []:
        yield ServerSentEvent(event="note", data={"text": note})
    while True:
        try:
            lines = await run_in_threadpool(lambda: output.new(last=not query.follow))
        except ShoalError as error:
            yield ServerSentEvent(event="failed", data={"message": str(error), "request": False})
            return
        new = [
            {"log": key, "number": place.seen[key], "line": line}
            for key, line in lines
            if place.passes(key, past)
        ]
        if first and query.tail is not None:
            new = new[len(new) - min(query.tail, len(new)) :]
        first = False
        for number, line in enumerate(new, start=1):
            yield ServerSentEvent(event="line", id=str(place) if number == len(new) else None, data=line)
        if not query.follow or not output.runs:
            yield ServerSentEvent(event="end", data={"sentences": await run_in_threadpool(output.closing)})
            return
        await anyio.sleep(LOOK_EVERY_S)


async def app_log_stream(
    record: ClusterRecord, wanted: Wanted, follow: bool, after: str | None
) -> AsyncIterator[ServerSentEvent]:
    """`line` for each line of the app's processes, as of a job's; `note`; at last `end` or `failed`."""
    place, placed_at = Place() if after is None else Place.read(after), 0.0
    global _reading
    if _reading >= MOST_PROCESSES:
        message = f"{MOST_PROCESSES} others read what apps print; try again later"
        yield ServerSentEvent(event="failed", data={"message": message, "request": False})
        return
    _reading += 1
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "infra.api.app_log_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(question(record, wanted, follow, place.seen))
        await process.stdin.drain()
        failed = False
        async for line in process.stdout:
            told = json.loads(line)
            failed, identity = told["kind"] == "failed", None
            if told["kind"] == "line":
                place.reach(told["data"]["log"], told["data"]["number"])
                if time.monotonic() - placed_at > PLACE_EVERY_S:
                    identity, placed_at = str(place), time.monotonic()
            yield ServerSentEvent(event=told["kind"], id=identity, data=told["data"])
        if not failed:
            code = await process.wait()
            if code == 0:
                yield ServerSentEvent(event="end", data={"sentences": []})
            else:
                message = f"the process that reads what apps print ended with {code}"
                yield ServerSentEvent(event="failed", data={"message": message, "request": False})
    finally:
        _reading -= 1
        if process is not None and process.returncode is None:
            process.kill()
