"""One run from the request to the finished output: plan, lease, Ray Data, and the end."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import ray

from cluster.config.models.model_sizes import is_directory
from cluster.config.sections.root import ShoalConfig
from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.sharing.client import BrokerClient
from cluster.state.connection import disconnect
from cluster.wording import counted
from serve_apps.batch.board import CALL_TIMEOUT_S, BoardState, open_board
from serve_apps.batch.manifest import Manifest, Totals, read_manifest
from serve_apps.batch.placement import LEASE_TIMEOUT_S, Devices
from serve_apps.batch.plan import Plan, Shard, choose_rows_per_shard, digest, plan_shards, shards_at_once
from serve_apps.batch.progress import Progress, View
from serve_apps.batch.request import BatchRequest
from serve_apps.batch.rows import check_options
from serve_apps.batch.shard_file import read_totals
from serve_apps.batch.source import Source
from serve_apps.batch.worker import ShardWorker, WorkerSettings, rows_in_flight
from serve_apps.commands import resolve
from serve_apps.spec import AppSpec

if TYPE_CHECKING:
    from ray.data import Dataset


def run_app(config: ShoalConfig, name: str, request: BatchRequest, view: View) -> dict[str, Any]:
    """Answer the rows of an input with an app of the config; what an earlier run did is not done again.

    Needs a connection to the cluster.

    Returns:
        {"app", "model", "input", "output", "rows", "failed", "skipped", "prompt_tokens",
        "completion_tokens", "seconds"}: rows, failed and tokens of the whole output, of which earlier runs
        did `skipped` rows; the seconds of this run.

    Raises:
        RequestError: something about the request is wrong; nothing was started or changed.
        ShoalError: there is no room, or it failed; the same call goes on from there.
    """
    storage = BrokerClient().info()["storage"]
    app = config.serve_apps.get(name)
    before = read_manifest(Storage(request.output))
    if app is not None and before is not None and before.model == app.model and not is_directory(app.model):
        # What the name means now must not mix with what it meant when the output was begun.
        app = app.model_copy(update={"model": before.model_version})
        config = config.model_copy(update={"serve_apps": {**config.serve_apps, name: app}})
        return run_spec(resolve(config, name, storage), request, view, model=before.model)
    return run_spec(resolve(config, name, storage), request, view)


def run_and_leave(config: ShoalConfig, name: str, request: BatchRequest, view: View) -> dict[str, Any]:
    """`run_app` in a process that does nothing else: it leaves the cluster at the end.

    What Ray prints on standard output when a process dies, some of it only when the connection ends, is
    dropped: the result belongs there, and `view` says it in our words.
    """
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), view:
        try:
            return run_app(config, name, request, view)
        finally:
            disconnect()


def run_spec(
    spec: AppSpec,
    request: BatchRequest,
    view: View,
    *,
    model: str | None = None,
    lease_timeout_s: float = LEASE_TIMEOUT_S,
) -> dict[str, Any]:
    """`run_app` of one spec; `model` is what the config calls its model."""
    began = time.monotonic()
    replicas = request.replicas or max(1, spec.config.replicas.min)
    check_options(spec.name, request.options, spec.config.limits)
    output = Storage(request.output)
    source = Source(request.input)
    _check_apart(source.location, output.location)
    wanted, plan = _plan(spec, request, source, output, replicas, model)
    manifest = wanted
    before = read_manifest(output)
    if before is not None:
        wanted.require_same(before, output.location)
        manifest = before

    def document(totals: Totals, skipped: int) -> dict[str, Any]:
        return {
            "app": spec.name,
            "model": manifest.model_version,
            "input": manifest.input,
            "output": output.location,
            **asdict(totals),
            "skipped": skipped,
            "seconds": round(time.monotonic() - began, 3),
        }

    if manifest.state == "done" and manifest.totals is not None:
        view.say(f"{output.location} is complete: all {plan.rows:,} rows were done before")
        return document(manifest.totals, plan.rows)
    lock = f"batch/{spec.name}-{hashlib.sha256(output.location.encode()).hexdigest()[:8]}"
    board = open_board(lock, output.location)
    try:
        if read_manifest(output) != before:
            raise ShoalError(f"another run began or ended in {output.location} just now; try again")
        names = set(output.list())
        done = plan.done(names)
        earlier = sum((read_totals(output, plan.file_of(shard)) for shard in done), Totals())
        _check_rows(earlier, done, output)
        if before is None:
            manifest.write(output)
        elif done:
            view.say(f"going on with {output.location}: {earlier.rows:,} of {plan.rows:,} rows are done")
        to_do = plan.to_do(names)
        if to_do:
            run = _RunOnDevices(spec, request, replicas, view, board, lock, plan, earlier)
            new = run.answer(to_do, manifest, source.location, output.location, lease_timeout_s)
        else:
            new = Totals()
        manifest = replace(manifest, state="done", totals=earlier + new)
        manifest.write(output)
    finally:
        ray.kill(board)
    return document(earlier + new, earlier.rows)


class _RunOnDevices:
    """The part of a run that has devices."""

    def __init__(
        self,
        spec: AppSpec,
        request: BatchRequest,
        replicas: int,
        view: View,
        board: Any,
        holder: str,
        plan: Plan,
        earlier: Totals,
    ) -> None:
        self._spec = spec
        self._request = request
        self._replicas = replicas
        self._view = view
        self._board = board
        self._holder = holder
        self._plan = plan
        self._earlier = earlier
        self._notes = 0

    def answer(
        self,
        shards: Sequence[Shard],
        manifest: Manifest,
        source: str,
        output: str,
        lease_timeout_s: float,
    ) -> Totals:
        """Have all shards answered; their sums."""
        settings = WorkerSettings(
            spec=self._spec.as_json(),
            options=dict(self._request.options),
            input=source,
            output=output,
            created_at=manifest.created_at,
            board=self._holder,
        )
        # More replicas than shards would wait for the others.
        replicas = min(self._replicas, len(shards))
        self._view.say(
            f"{self._spec.name}: {counted(sum(shard.rows for shard in shards), 'row')}"
            f" in {counted(len(shards), 'shard')} by {counted(replicas, 'replica')}"
            f" of {counted(self._spec.config.ranks, 'rank')} with {manifest.model_version}"
        )
        broker = BrokerClient()
        lease = Devices(self._spec, self._holder, replicas, broker, self._look, timeout_s=lease_timeout_s)
        with lease as devices, _quiet_ray_data():
            dataset = self._dataset(shards, settings, devices, replicas, manifest.rows_per_shard)
            try:
                new = sum((_totals(facts) for facts in dataset.iter_rows()), Totals())
            except ray.exceptions.RayError as error:
                raise ShoalError(self._why(error)) from error
            ray.get(self._board.close.remote(), timeout=CALL_TIMEOUT_S)
        self._look()
        return new

    def _dataset(
        self,
        shards: Sequence[Shard],
        settings: WorkerSettings,
        devices: Devices,
        replicas: int,
        rows_per_shard: int,
    ) -> Dataset:
        """One row a shard, each a task of its own, through a fixed pool of replicas."""
        from ray.data import ActorPoolStrategy, from_items

        # Ray 2.64 takes `ray_remote_args_fn` away, the only way to give each actor of a pool a placement
        # group of its own; Ray's own batch inference needs it likewise.
        warnings.filterwarnings("ignore", message="`ray_remote_args_fn` is deprecated")

        rows = [{**asdict(shard), "file": self._plan.file_of(shard)} for shard in shards]
        at_once = shards_at_once(rows_per_shard, rows_in_flight(self._spec))
        first_rank = devices.first_rank
        return from_items(rows, override_num_blocks=len(rows)).map(
            ShardWorker,
            fn_constructor_args=(settings.as_text(),),
            compute=ActorPoolStrategy(
                size=replicas,
                max_tasks_in_flight_per_actor=at_once,
                max_concurrent_calls_per_actor=at_once,
                enable_true_multi_threading=True,
            ),
            num_cpus=first_rank.get("CPU", 0.0),
            num_gpus=first_rank.get("GPU", 0.0),
            ray_remote_args_fn=devices.actor_options,
        )

    def _look(self) -> None:
        """Show what the board says."""
        state: BoardState = ray.get(self._board.read.remote(), timeout=CALL_TIMEOUT_S)
        for note in state.notes[self._notes :]:
            self._view.say(note)
        self._notes = len(state.notes)
        new = sum(state.shards.values(), Totals())
        self._view.show(Progress(self._plan.rows, self._earlier + new, new, state.seconds))

    def _why(self, error: ray.exceptions.RayError) -> str:
        """Why the run failed, and what can be done."""
        state: BoardState = ray.get(self._board.read.remote(), timeout=CALL_TIMEOUT_S)
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = state.failure or (lines[-1].strip() if lines else type(error).__name__)
        return f"{self._spec.name}: {why}\nwhat is done is kept: the same command goes on from there"


def _plan(
    spec: AppSpec, request: BatchRequest, source: Source, output: Storage, replicas: int, model: str | None
) -> tuple[Manifest, Plan]:
    """The shards, and the manifest that an output of theirs has."""
    files = source.check()
    rows = sum(file.rows for file in files)
    before = read_manifest(output)
    rows_per_shard = request.rows_per_shard
    if rows_per_shard is None and before is not None:
        rows_per_shard = before.rows_per_shard
    if rows_per_shard is None:
        rows_per_shard = choose_rows_per_shard(rows, replicas, spec.config.limits.batch)
    plan = plan_shards(files, rows_per_shard)
    wanted = Manifest(
        app=spec.name,
        model=model or spec.config.model,
        model_version=spec.model_version,
        engine=spec.engine,
        precision=spec.config.precision,
        context_length=spec.config.limits.context_length,
        max_tokens=spec.config.limits.max_tokens,
        sampling=dict(request.options),
        input=source.location,
        input_digest=digest(files),
        rows=rows,
        rows_per_shard=rows_per_shard,
        shards=len(plan.shards),
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
    )
    return wanted, plan


def _check_apart(source: str, output: str) -> None:
    """What is written must not become part of what is read."""
    if output.rstrip("/") == source.rstrip("/") or output.startswith(source.rstrip("/") + "/"):
        raise RequestError(f"--output {output} is inside --input {source}; name a directory outside of it")


def _check_rows(earlier: Totals, done: Sequence[Shard], output: Storage) -> None:
    if earlier.rows != sum(shard.rows for shard in done):
        raise RequestError(
            f"the files in {output.location} have {earlier.rows} rows where"
            f" {sum(shard.rows for shard in done)} were written; they were changed since"
        )


def _totals(facts: Mapping[str, Any]) -> Totals:
    return Totals(**{name: int(facts[name]) for name in asdict(Totals())})


@contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """Ray Data without its own bars and reports, and with all the time that a shard may take."""
    from ray.data import DataContext

    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with DataContext.current(context):
            yield
    finally:
        logger.setLevel(level)
