"""Who works alone for longer than a step may take is waited for, and who hangs in a step is not."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, reports, run_program, tiny_job, write_corpus
from train_jobs.rank import process
from train_jobs.records.workspace import Workspace

STEP_S = 1.0
ALONE_S = 3.0
"""Longer than a collective of a step may take, which is STEP_S."""


def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(ALONE_S)
        return work(*arguments, **options)

    return slow


def rank_0_is_slow(config_json: str, run: str, attempt: int, at: str) -> None:
    """Train to the end, rank 0 taking its time at one place."""
    import torch.distributed as dist

    from train_jobs.checkpoint import restore
    from train_jobs.checkpoint.store import CheckpointStore
    from train_jobs.parallel import mesh
    from train_jobs.parallel.torch_private import set_timeout
    from train_jobs.rank.assembly import RankAssembly

    mesh.AFTER_HANG_S = 0.0
    if at == "building":
        assert dist.group.WORLD is not None
        set_timeout(dist.group.WORLD, timedelta(seconds=STEP_S))
    if dist.get_rank() == 0 and at == "building":
        RankAssembly._build = slowly(RankAssembly._build)  # type: ignore[method-assign]
    if dist.get_rank() == 0 and at == "listing":
        restore._candidates = slowly(restore._candidates)
    if dist.get_rank() == 0 and at == "preparing":
        CheckpointStore.prepare = slowly(CheckpointStore.prepare)  # type: ignore[method-assign]
    if dist.get_rank() == 0 and at == "clearing":
        CheckpointStore.retain = slowly(CheckpointStore.retain)  # type: ignore[method-assign]
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run), attempt)
    if dist.get_rank() == 0 and at == "exporting":
        assembly.task.export = slowly(assembly.task.export)  # type: ignore[method-assign]
    assembly.begin()
    assert assembly.loop.run() == "finished"
    assembly.export()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


def job(corpus: Path, **changes: Any) -> TrainJobConfig:
    recovery = {"hang_timeout_s": STEP_S, "start_timeout_s": 60.0, "save_timeout_s": 60.0}
    return tiny_job(corpus, recovery=recovery, **{"parallel": {"strategy": "fsdp"}, **changes})


def trained(config: TrainJobConfig, run: Path, attempt: int, at: str) -> list[int]:
    """Train with a slow rank 0; the steps of that attempt."""
    from train_jobs.data.preparation import prepare_data

    prepare_data(config, run / "data")
    run_program(rank_0_is_slow, run, 2, config.model_dump_json(), str(run), attempt, at)
    lines = [line for line in reports(run) if "kind" not in line and line["attempt"] == attempt]
    return [line["step"] for line in lines if "loss" in line]


def test_a_node_has_its_data_before_its_ranks_meet(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    spec = SimpleNamespace(config=job(corpus), run=str(tmp_path), job="own-1", attempt=1, nodes=["here"])
    worker = SimpleNamespace(
        order=lambda: SimpleNamespace(environment={}, spec=spec, heart=None, device=None),
        stay=threading.Event().wait,
        finish=done.append,
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(process, "reach_worker", lambda _: worker)
    monkeypatch.setattr(process, "reporter_of", lambda *_: None)
    monkeypatch.setattr(process, "_be_watched", lambda *_: None)
    monkeypatch.setattr(process, "_meet", lambda *_: done.append("met"))
    monkeypatch.setattr(process._TaskRun, "run", lambda _: "finished")
    monkeypatch.setattr(Workspace, "fetch", lambda _, name: done.append(f"{name} fetched"))
    process.run_rank_process("127.0.0.1:1", "00")
    assert done == ["data fetched", "met", "finished"]


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "at", ["exporting", *(pytest.param(at, marks=pytest.mark.slow) for at in ("preparing", "clearing"))]
)
def test_the_others_wait_for_rank_0_where_it_works_alone(
    at: str, asynchronous: bool, corpus: Path, tmp_path: Path
) -> None:
    config = job(corpus, checkpoint={"every_steps": 4, "keep": 1, "asynchronous": asynchronous})
    assert trained(config, tmp_path, 1, at) == [*range(1, 9)]
    assert (tmp_path / "export" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_nobody_waits_in_a_group_of_steps_for_one_that_builds_its_model(
    strategy: str, corpus: Path, tmp_path: Path
) -> None:
    """Under `fsdp` rank 0 alone reads the weights; under `ddp` each does, and one may take longer."""
    config = job(corpus, parallel={"strategy": strategy})
    assert trained(config, tmp_path, 1, "building") == [*range(1, 9)]


@pytest.mark.slow
def test_the_others_wait_for_rank_0_while_it_looks_for_checkpoints(corpus: Path, tmp_path: Path) -> None:
    config = job(corpus, checkpoint={"every_steps": 4, "keep": 1})
    trained(config, tmp_path, 1, "nowhere")
    assert trained(config.model_copy(update={"steps": 10}), tmp_path, 2, "listing") == [9, 10]


def one_hangs_in_a_step(config_json: str, run: str) -> None:
    """Rank 1 stands still in its third step; rank 0 must be told by its collective."""
    import torch.distributed as dist

    from train_jobs.parallel import mesh

    mesh.AFTER_HANG_S = 0.0
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    assembly.begin()
    for _ in range(2):
        assembly.loop.step()
    if dist.get_rank() == 1:
        time.sleep(4 * STEP_S)
        sys.exit(0)
    began = time.monotonic()
    try:
        assembly.loop.step()
    except RuntimeError as error:
        assert "timed out" in str(error).lower()  # noqa: PT017
        assert time.monotonic() - began < 3 * STEP_S
        sys.exit(0)
    raise AssertionError("nobody noticed")


def test_after_the_first_step_a_collective_has_the_time_of_a_step(corpus: Path, tmp_path: Path) -> None:
    from train_jobs.data.preparation import prepare_data

    config = job(corpus, parallel={"strategy": "ddp"})
    prepare_data(config, tmp_path / "data")
    run_program(one_hangs_in_a_step, tmp_path, 2, config.model_dump_json(), str(tmp_path))


def groups_and_times(out: str) -> None:
    """Every group that a mesh has, waited in by rank 0 alone."""
    import torch
    import torch.distributed as dist

    from cluster.planning.topology import MeshShape
    from train_jobs.parallel import mesh

    mesh.AFTER_HANG_S = 0.0

    def limits(of: list[dist.ProcessGroup]) -> list[float]:
        backends = [group._get_backend(device) for group in of]
        return [backend.options._timeout.total_seconds() for backend in backends]  # type: ignore[attr-defined]

    shape, device = MeshShape(dp_replicate=2, dp_shard=2, cp=1, tp=1), torch.device("cpu")
    made = mesh.Mesh(shape, device, 5000.0)
    of_axes = [*made.axes.get_all_groups(), *made.parameters.get_all_groups()]
    groups = [dist.group.WORLD, *(group for group in of_axes if dist.get_world_size(group) > 1)]
    assert len({*groups}) > 2, "the axes have groups of their own"
    with made.adopting():
        own = dist.new_group()
    assert own is not None
    groups.append(own)
    assert limits(made.axes.get_all_groups()) == limits([own, own]) == [5000.0, 5000.0], "while they start"
    late = mesh.Mesh(shape, device, 5000.0)
    late.limit_steps(60.0)
    assert limits(late.axes.get_all_groups()) == [60.0, 60.0], "though their groups are only made now"
    made.limit_steps(0.5)
    for group in groups:
        dist.barrier(group)
    if dist.get_rank() == 0:
        for group in groups:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout"):
                dist.all_reduce(torch.zeros(1), group=group)
            assert time.monotonic() - began < 5
        Path(out).write_text("all of them")
    else:
        deadline = time.monotonic() + 60
        while not Path(out).exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def test_the_groups_of_the_axes_have_the_limit_of_the_start_and_then_that_of_a_step(tmp_path: Path) -> None:
    """And what is private of torch does what it did."""
    run_program(groups_and_times, tmp_path, 4, str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "all of them"
