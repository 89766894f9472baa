"""Ranks of jobs in which steps go wrong, or a rank is slow."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble


@dataclass
class Case:
    """A job, and what happens in it.

    Attributes:
        run: the run's directory.
        spoilt: by global batch, what its loss is multiplied by.
        leaves_out: steps (from 1) that are not done at all, as if they had never been asked for.
        takes: the global batch that each step takes; None for those that it asks for.
    """

    run: str
    config: str
    spoilt: dict[str, float] = field(default_factory=dict)
    leaves_out: list[int] = field(default_factory=list)
    takes: list[int] | None = None


def train_all(cases: str) -> None:
    """A rank of one job after the other."""
    for case in json.loads(cases):
        _train(Case(**case))


def written(cases: list[Case]) -> str:
    return json.dumps([asdict(case) for case in cases])


def _train(case: Case) -> None:
    """A rank from restoring to the last step; how it ended is left in the run's directory."""
    import torch.distributed as dist

    assembly = assemble(TrainJobConfig.model_validate_json(case.config), Path(case.run))
    loop, state = assembly.loop, assembly.state
    spoil(loop, case.spoilt, case.takes)
    digests = []
    step = loop.step

    def step_and_digest() -> bool:
        if state.step + 1 in case.leaves_out:
            state.step += 1
            return False
        stop = step()
        digests.append([state.step, digest(state)])
        return stop

    loop.step = step_and_digest  # type: ignore[method-assign]
    error = None
    try:
        assembly.begin()
        loop.run()
    except Exception as problem:  # noqa: BLE001
        error = f"{type(problem).__name__}: {problem}"
    end = {"error": error, "step": state.step, "digests": digests, "passed_over": state.guard.passed_over}
    (Path(case.run) / f"end-{dist.get_rank()}.json").write_text(json.dumps(end))


def spoil(loop: Any, factors: dict[str, float], takes: list[int] | None = None) -> None:
    """Change what steps take, and what comes of it.

    Args:
        factors: by global batch, what its loss is multiplied by.
    """
    from train_jobs.tasks.task import Sums

    loss, read, taken = loop.task.loss, loop.loader.step, [-1]

    def take(batch: int, place: Any) -> Any:
        taken[0] = batch if takes is None else takes[loop.state.step]
        return read(taken[0], place)

    def spoilt(module: Any, batch: Any) -> Any:
        sums = loss(module, batch)
        factor = factors.get(str(taken[0])) if module.training else None
        return sums if factor is None else Sums(sums.loss * factor, sums.count, sums.others)

    loop.loader.step, loop.task.loss = take, spoilt


def slow_down(model: Any, times: Callable[[], float]) -> None:
    """Let the blocks of a model compute for a while; so many times as long as they would."""

    def slowed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            time.sleep(0.003)
            result = forward(*args, **kwargs)
            time.sleep((times() - 1.0) * (time.perf_counter() - began))
            return result

        return slow

    for block in [each for each in model.modules() if "DecoderLayer" in type(each).__name__]:
        block.forward = slowed(block.forward)


def digest(state: Any) -> str:
    """Of model and optimizer, bit by bit."""
    import torch

    found = hashlib.sha256()
    for name, value in sorted(state.handed_on()["tensors"].items()):
        found.update(name.encode())
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_as_before_there_were_guards(config: str, run: str) -> None:
    """A checkpoint without a guard's state is saved, and loaded by a job that has one."""
    from train_jobs.checkpoint.state import TrainingState

    progress = TrainingState._progress
    assembly = assemble(TrainJobConfig.model_validate_json(config), Path(run))
    TrainingState._progress = lambda state: {  # type: ignore[method-assign]
        key: value for key, value in progress(state).items() if key != "guard"
    }
    for _ in range(3):
        assembly.loop.step()
    assembly.saver.save()
    assembly.saver.finish()
    TrainingState._progress = progress  # type: ignore[method-assign]
    again = assemble(TrainJobConfig.model_validate_json(config), Path(run), attempt=2)
    assert again.begin() == 3
    assert digest(again.state) == digest(assembly.state)
    again.loop.run()


def train_with_a_slow_rank(config: str, run: str, slow: int, first: int, last: int) -> None:
    """A rank of a job; one takes three times as long as the others in some of the steps (from 1)."""
    import torch.distributed as dist

    assembly = assemble(TrainJobConfig.model_validate_json(config), Path(run))

    def times() -> float:
        slowed = dist.get_rank() == slow and first <= assembly.state.step + 1 <= last
        return 3.0 if slowed else 1.0

    slow_down(assembly.parallel.module, times)
    assembly.begin()
    assembly.loop.run()
