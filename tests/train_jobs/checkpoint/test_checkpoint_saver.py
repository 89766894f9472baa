"""Saves that fail: seen, counted, and survived as often as the job allows."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, reports, run_program, tiny_job, write_corpus
from train_jobs.checkpoint.files import CheckpointReader
from train_jobs.checkpoint.host_copies import HostCopies
from train_jobs.checkpoint.store import checkpoint_name
from train_jobs.data.preparation import prepare_data
from train_jobs.errors import CheckpointError


def fail_now_and_then(config_json: str, run: str) -> None:
    """Rank 1's files may not grow, for a while; then for longer than the job allows."""
    import torch.distributed as dist

    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    saver = assembly.saver
    outcomes: list[Any] = []

    def save(*, limited: bool) -> None:
        assembly.loop.step()
        no_limit = resource.RLIM_INFINITY
        limit = 4096 if limited and dist.get_rank() == 1 else no_limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, no_limit))
        try:
            saver.save()
            saver.finish()
            outcomes.append([saver.failures, assembly.store.steps()])
        except CheckpointError as error:
            outcomes.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (no_limit, no_limit))

    for limited in (False, True, True, False, True, True, True):
        save(limited=limited)
        dist.barrier()
    (Path(run) / f"outcomes-{dist.get_rank()}.json").write_text(json.dumps(outcomes))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_on_one_rank_is_counted_on_all(asynchronous: bool, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet")
    config = tiny_job(
        corpus,
        steps=20,
        parallel={"strategy": "fsdp"},
        checkpoint={"asynchronous": asynchronous, "keep": 5},
        recovery={"checkpoint_failures": 2},
    )
    run = tmp_path / "run"
    prepare_data(config, run / "data")
    run_program(fail_now_and_then, run, 2, config.model_dump_json(), str(run))
    for rank in (0, 1):
        *counted, last = json.loads((run / f"outcomes-{rank}.json").read_text())
        assert counted == [[0, [1]], [1, [1]], [2, [1]], [0, [1, 4]], [1, [1, 4]], [2, [1, 4]]]
        assert last.startswith(
            "3 checkpoints in a row could not be saved (recovery.checkpoint_failures allows 2)"
        )
        assert "the last, of step 7: rank 1: " in last
        assert "file too large" in last
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert kept == [checkpoint_name(1), checkpoint_name(4)], "halves take the room that the next ones need"
    said = [(line["kind"], line["step"]) for line in reports(run) if "kind" in line]
    assert said == [
        *[("checkpointed", 1), ("checkpoint_failed", 2), ("checkpoint_failed", 3), ("checkpointed", 4)],
        *[("checkpoint_failed", 5), ("checkpoint_failed", 6), ("checkpoint_failed", 7)],
    ]


def block(config_json: str, run: str) -> None:
    """A file lies where the checkpoint's directory should be: rank 0 cannot make room."""
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    checkpoints = Path(run) / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    assembly.loop.step()
    import torch.distributed as dist

    if dist.get_rank() == 0:
        (checkpoints / "step-00000001").write_text("in the way")
    dist.barrier()
    assembly.saver.save()
    assert assembly.saver.failures == 1
    assembly.loop.step()
    assembly.saver.save()
    assembly.saver.finish()
    assert assembly.saver.failures == 0


def test_a_checkpoint_that_cannot_be_begun_is_counted_too(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"), steps=20)
    run = tmp_path / "run"
    prepare_data(config, run / "data")
    run_program(block, run, 2, config.model_dump_json(), str(run))
    (failed,) = [line for line in reports(run) if line.get("kind") == "checkpoint_failed"]
    assert "step-00000001" in failed["reason"]


class LateTransfer:
    """As that of a GPU, at its worst: every copy returns at once, and reads only when it is waited for."""

    def __init__(self) -> None:
        self.marked = False
        self.copies: list[tuple[Tensor, Tensor]] = []

    def mark(self) -> None:
        self.marked = True

    def takes(self, tensor: Tensor) -> bool:
        return True

    def room(self, like: Tensor) -> Tensor:
        return like.clone().fill_(-7)

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert self.marked, "what was begun before must come first"
        self.copies.append((source, target))

    def finish(self) -> None:
        time.sleep(0.5)
        for source, target in self.copies:
            target.copy_(source)
        self.marked, self.copies = False, []


def save_while_stepping(config_json: str, run: str, device: str) -> None:
    """Saves in the background whose copy is made late, while the next forward and backward already ran."""
    import torch.distributed as dist

    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    copies = assembly.state._copies = HostCopies(LateTransfer() if device == "gpu" else None)
    begin, held = copies.begin, list[float]()

    def late(state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        make = begin(state)
        return lambda: (time.sleep(0.5), make())[1]

    if device == "cpu":
        copies.begin = late  # type: ignore[method-assign]
    saved: dict[int, dict[str, torch.Tensor]] = {}
    for _ in range(3):
        assembly.loop.step()
        assembly.parallel.agree_on_statistics()  # rank 0's are saved
        saved[assembly.state.step] = {
            name: value.detach().clone()
            for name, value in assembly.state.parallel.stepped.state_dict().items()
        }
        assembly.saver.save()
        before = time.perf_counter()
        assembly.loop.step()
        held.append(time.perf_counter() - before)
    assembly.saver.finish()
    again = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    for step, state in saved.items():
        again.state.load(CheckpointReader(again.store.storage, checkpoint_name(step)))
        found = again.state.parallel.stepped.state_dict()
        assert state.keys() == found.keys()
        for name, value in state.items():
            assert torch.equal(value, found[name]), f"{name} of step {step}"
    # The call returned before the copy was made; the optimizer waited for it.
    assert min(held) > 0.4, held
    assert assembly.saver.stalled_s > 0.4
    dist.barrier()


@pytest.mark.parametrize(
    ("strategy", "device"),
    [
        pytest.param("ddp", "cpu", marks=pytest.mark.slow),
        pytest.param("ddp", "gpu", marks=pytest.mark.slow),
        pytest.param("zero1", "cpu", marks=pytest.mark.slow),
        ("zero1", "gpu"),
    ],
)
def test_a_background_save_holds_what_was_there_when_it_was_asked_for(
    strategy: str, device: str, tmp_path: Path
) -> None:
    # Four rows on three ranks are 2, 2 and none: a rank may have an empty share of a tensor.
    config = TrainJobConfig.model_validate(
        {
            "task": "image_classification",
            "model": {"architecture": "resnet", "hidden_sizes": [4], "depths": [1], "embedding_size": 4},
            "parallel": {"strategy": strategy},
            "batch": {"global": 6, "micro": 2},
            "checkpoint": {"asynchronous": True, "keep": 5},
            "steps": 20,
        }
    )
    run = tmp_path / "run"
    prepare_data(config, run / "data")
    run_program(save_while_stepping, run, 3, config.model_dump_json(by_alias=True), str(run), device)
