"""Paths about training jobs, and what travels with them."""

from collections.abc import AsyncIterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field

from cluster.config.sections.section import Name
from cluster.config.sections.train import TrainJobConfig
from infra.api.control import Control
from infra.api.door import Door
from infra.api.errors import CHANGE_ERRORS, READ_ERRORS, STREAM_ERRORS
from infra.api.exports import export_on_head, tar_of
from infra.api.job_stream import job_stream
from infra.api.place import NOW, Place, place_now
from infra.api.roles import ApiCaller
from train_jobs.records.listing import find_job, run_of

PACKAGE = r"^[0-9a-f]{64}$"
TAR = "application/x-tar"
PackageDigest = Annotated[str, Field(pattern=PACKAGE)]


class Traveller(BaseModel):
    """What comes along with a job."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    package: PackageDigest | None = None
    """The SHA-256 of a package that was sent; None where nothing travels."""
    environment: dict[str, str] = {}
    """Values of the variables that the job's `env` passes on."""


class JobSubmission(Traveller):
    """A job to start."""

    name: Name
    """Its name in the config."""
    config: TrainJobConfig
    """Its section of the config, paths resolved."""


class JobExport(BaseModel):
    """Which checkpoint is to become a model."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    step: int | None = Field(default=None, ge=0, le=2**53)
    """None for the newest."""
    package: PackageDigest | None = None
    """The SHA-256 of a package that was sent: the code of a task that is the user's."""


class JobResumption(Traveller):
    """How to go on with a job."""

    settings: list[str] = []
    """Changes of its config: KEY=VALUE, as `--set` takes them."""
    base: str = "/"
    """Where relative paths of these start."""
    only_plan: bool = False
    """Only say what it would mean, and which config it would go on with."""


def add(router: APIRouter, control: Control, door: Door) -> None:
    """Add them."""
    reader = Annotated[ApiCaller, Depends(door.needs("read"))]
    runner = Annotated[ApiCaller, Depends(door.needs("run"))]
    jobs = control.jobs
    tags: list[str | Enum] = ["jobs"]

    def found(job: str) -> str:
        return find_job(control.storage, job)

    @router.put("/packages/{digest}", responses=CHANGE_ERRORS, tags=tags)
    async def send_package(caller: runner, request: Request, digest: str) -> dict[str, Any]:
        """Send what travels with a job, a .tar.gz, before the job; it is kept for an hour at most."""
        return {"package": digest, "size_bytes": await control.packages.take(digest, request.stream())}

    @router.get("/jobs", responses=READ_ERRORS, tags=tags)
    def list_all(caller: reader) -> list[dict[str, Any]]:
        """One row a job, the oldest first, as `shoal jobs --json` prints them."""
        return jobs.list()

    @router.post("/jobs", status_code=201, responses=CHANGE_ERRORS, tags=tags)
    def submit_job(caller: runner, request: Request, wanted: JobSubmission) -> dict[str, Any]:
        """Start a job; its stream tells how it goes."""
        with (
            door.change(caller, request, wanted.name) as change,
            control.packages.opened(wanted.package) as package,
        ):
            submitted = jobs.submit(wanted.name, wanted.config, package, wanted.environment)
            change.result = submitted.job
        control.packages.drop(wanted.package)
        return asdict(submitted)

    @router.get("/jobs/{job}", responses=READ_ERRORS, tags=tags)
    def show_job(caller: reader, job: str) -> dict[str, Any]:
        """The document that `shoal train --json` prints, as far as the job is."""
        return jobs.result(job)

    @router.get("/jobs/{job}/checkpoints", responses=READ_ERRORS, tags=tags)
    def list_checkpoints(caller: reader, job: str) -> dict[str, Any]:
        """The job's id, and its checkpoints, the oldest first."""
        return jobs.checkpoints(job)

    @router.post(
        "/jobs/{job}/export",
        responses={**CHANGE_ERRORS, 200: {"content": {TAR: {}}, "description": "The model's files."}},
        response_class=StreamingResponse,
        tags=tags,
    )
    def export_job(caller: runner, request: Request, job: str, how: JobExport) -> StreamingResponse:
        """A checkpoint as a model in the Hugging Face format: a tar archive. `x-shoal-job` and `x-shoal-step`
        say of what."""
        name = find_job(control.storage, job)
        with (
            door.change(caller, request, name),
            control.packages.opened(how.package) as package,
        ):
            step, model = export_on_head(control.storage, name, how.step, package.base)
        headers = {"x-shoal-job": name, "x-shoal-step": str(step)}
        return StreamingResponse(tar_of(model), media_type=TAR, headers=headers)

    @router.post("/jobs/{job}/stop", status_code=202, responses=CHANGE_ERRORS, tags=tags)
    def stop_job(caller: runner, request: Request, job: str) -> dict[str, Any]:
        """Have a job stop at its next step boundary; its stream tells when it has."""
        with door.change(caller, request, job) as change:
            stopped = jobs.stop(job)
            change.result = stopped["job"]
            return stopped

    @router.post("/jobs/{job}/resume", status_code=201, responses=CHANGE_ERRORS, tags=tags)
    def resume_job(caller: runner, request: Request, job: str, how: JobResumption) -> dict[str, Any]:
        """Go on with a job that has ended early; with `only_plan` say what that would mean. `place` is where
        its stream goes on."""
        plan = jobs.plan_to_resume(job, how.settings, Path(how.base))
        config = plan.config.model_dump(mode="json", by_alias=True)
        place = str(place_now(run_of(control.storage, plan.job), plan.job))
        document = {"job": plan.job, "name": plan.name, "said": plan.said, "config": config, "place": place}
        if how.only_plan:
            return {**document, "submission_id": None}
        with (
            door.change(caller, request, job) as change,
            control.packages.opened(how.package) as package,
        ):
            submitted = jobs.resume(plan, package, how.environment)
            change.result = submitted.job
        control.packages.drop(how.package)
        return {**document, "submission_id": submitted.submission_id}

    async def place(
        job: Annotated[str, Depends(found)],
        after: Annotated[str | None, Query(description=f"A place, or `{NOW}`: only what comes.")] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> tuple[str, str | None]:
        known = last_event_id or after
        if known not in (None, NOW):
            Place.read(str(known))  # a wrong one is told before the stream begins
        return job, known

    @router.get("/jobs/{job}/stream", responses=STREAM_ERRORS, response_class=EventSourceResponse, tags=tags)
    async def stream_job(
        caller: reader, where: Annotated[tuple[str, str | None], Depends(place)]
    ) -> AsyncIterator[ServerSentEvent]:
        """What the logs tell, as it comes, until the job has ended: `event`, `metric`, `printed` (by rank 0
        of a script), `note`; at last `end`, with the document of `shoal train`. After a lost connection it
        goes on from the last id."""
        job, after = where

        def status(submission_id: str | None) -> str | None:
            return control.submissions().status(submission_id) if submission_id else None

        run = run_of(control.storage, job)
        async for event in job_stream(run, job, after, status, lambda: jobs.result(job)):
            yield event
