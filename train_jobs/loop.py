"""The step loop of one rank."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.config.train_section import TrainJobConfig
from cluster.errors import RequestError
from train_jobs.checkpoint.saver import CheckpointSaver
from train_jobs.checkpoint.state import TrainingState
from train_jobs.data.loader import evaluation_batches
from train_jobs.data.source import Batch, as_samples
from train_jobs.errors import LossError
from train_jobs.metering.meter import Meter
from train_jobs.optimization.optimizers import set_learning_rate
from train_jobs.optimization.schedules import learning_rate
from train_jobs.parallel.model import ParallelModel
from train_jobs.quorum import Quorum
from train_jobs.tasks.task import Sums, Task


class Reporter(Protocol):
    """Where a rank says what it did; all but rank 0 say nothing."""

    def metric(self, line: dict[str, Any]) -> bool:
        """Log one step; True when the job has been asked to stop."""

    def event(self, kind: str, **facts: Any) -> None: ...


class StepLoop:
    """Steps, evaluates and saves until the job's last step, or until it is asked to stop.

    The gradient of a step is that of the mean loss over all that counts (tokens or samples) in its global
    batch, however its micro-batches and ranks share it: summed losses are divided by what the batch would
    count at most, and what really counted is put right before the gradients are clipped.
    """

    def __init__(
        self,
        *,
        config: TrainJobConfig,
        attempt: int,
        task: Task,
        parallel: ParallelModel,
        state: TrainingState,
        saver: CheckpointSaver,
        quorum: Quorum,
        meter: Meter,
        reporter: Reporter,
    ) -> None:
        self.config = config
        self.attempt = attempt
        self.task = task
        self.parallel = parallel
        self.state = state
        self.saver = saver
        self.quorum = quorum
        self.meter = meter
        self.reporter = reporter
        self.mesh = parallel.mesh
        self.loader = state.loader
        self.held_out = as_samples(task.samples(held_out=True))
        self.evaluation: dict[str, Any] | None = None

    def run(self) -> Literal["finished", "stopped"]:
        """Returns with the last step saved, on all ranks alike."""
        stop = False
        while self.state.step < self.config.steps and not stop:
            stop = self.step()
            self.saver.poll()
            step = self.state.step
            if self._due(self.config.evaluate.every_steps) and step < self.config.steps:
                self.evaluate()
            if self._due(self.config.checkpoint.every_steps) and step < self.config.steps:
                self._save()
        finished = self.state.step == self.config.steps
        if finished:
            self.evaluate()
        if self.saver.last != self.state.step and self.state.step:
            self._save()
        self.saver.finish()
        totals = self.meter.totals()
        if totals is not None:
            self.reporter.event("measured", attempt=self.attempt, **totals)
        return "finished" if finished else "stopped"

    def step(self) -> bool:
        """One optimizer step of the whole job; True when all ranks are to stop after it."""
        with self.meter.step():
            line, stop = self._step()
        figures = self.meter.line(line["samples"], line["tokens"])
        self._asked_to_stop = self.reporter.metric({**line, **figures})
        return stop

    _asked_to_stop = False  # what rank 0 heard after the last step; the others learn it with the next loss

    def _step(self) -> tuple[dict[str, Any], bool]:
        """What was computed in the step, and whether all ranks are to stop."""
        step, scale = self.state.step, self.state.loss_scale
        while True:
            place = self.quorum.start(step)
            most = self.config.batch.global_size * self.loader.targets_per_sample
            ranks = place.size * self.mesh.shape.cp  # strategies average over them
            mine = self._gradients(self.loader.step(step, place), scale.value * ranks / most)
            loss, count, stop = self._totals(mine)
            if self.quorum.commit():
                break
            self.parallel.drop_gradients()
        if count == 0:
            raise LossError(f"nothing counts in the global batch of step {step + 1}")
        if not math.isfinite(loss):
            raise LossError(f"the loss is {loss / count} in step {step + 1}")
        rate = learning_rate(self.config.optimizer, step, self.config.steps)
        set_learning_rate(self.state.optimizer, rate)
        norm = self.parallel.update(
            self.state.optimizer,
            most / count / scale.value,
            self.config.optimizer.max_grad_norm,
            self.saver.hold,
        )
        finite = math.isfinite(norm)
        if not finite and (not scale.enabled or scale.exhausted):
            raise LossError(f"the norm of the gradient is {norm} in step {step + 1}")
        self.parallel.drop_gradients()
        self.state.step = step + 1
        line = {
            "attempt": self.attempt,
            "step": self.state.step,
            "loss": loss / count,
            "learning_rate": rate,
            "grad_norm": norm if finite else None,
            "world_size": self.mesh.shape.world_size,
            "samples": int(count) if self.task.unit == "samples" else self.config.batch.global_size,
            "tokens": int(count) if self.task.unit == "tokens" else None,
        }
        if scale.enabled:
            line |= {"loss_scale": scale.shown, "skipped": not finite}
        scale.update(finite)
        return line, stop

    def _gradients(self, batches: list[Batch], factor: float) -> Tensor:
        """Forward and backward of this rank's samples; returns its summed loss and what counted."""
        module = self.parallel.module
        module.train()
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for index, batch in enumerate(batches):
            with self.parallel.micro_batch(self._to_device(batch), last=index == len(batches) - 1) as mine:
                with self.parallel.autocast():
                    result = self.task.loss(module, mine)
                self.parallel.backward(result.loss * factor)
            sums += _detached(result)[:2]
        return sums

    def _totals(self, mine: Tensor) -> tuple[float, float, bool]:
        """Summed loss and what counted, over the whole global batch, and whether all ranks are to stop."""
        totals = torch.cat((self._once(mine), mine.new_tensor([float(self._asked_to_stop)])))
        dist.all_reduce(totals)
        loss, count, stop = totals.tolist()
        return loss, count, stop > 0

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Evaluate every held-out sample once, each rank its share; all ranks get the same means."""
        module = self.parallel.module
        module.eval()
        self.parallel.agree_on_statistics()
        place = self.quorum.start(self.state.step)
        totals: Tensor | None = None
        names: list[str] = []
        for batch, counts in evaluation_batches(self.held_out, place, self.config.batch.micro):
            with self.parallel.micro_batch(self._to_device(batch)) as part, self.parallel.autocast():
                result = self.task.loss(module, part)
            sums = _detached(result) if counts else torch.zeros_like(_detached(result))
            names = list(result.others)
            totals = sums if totals is None else totals + sums
        if totals is None:
            raise RequestError("the task gives no held-out sample to evaluate on")
        totals = self._once(totals)
        dist.all_reduce(totals)
        loss, count, *others = totals.tolist()
        means = {name: total / count for name, total in zip(("loss", *names), (loss, *others), strict=True)}
        if self.task.unit == "tokens":
            means["perplexity"] = math.exp(min(means["loss"], 700.0))
        evaluation = {"step": self.state.step, **means, self.task.unit: int(count)}
        self.reporter.event("evaluated", attempt=self.attempt, **evaluation)
        self.evaluation = evaluation
        return evaluation

    def _save(self) -> None:
        """Save this step, with its evaluation where there was one."""
        known = self.evaluation is not None and self.evaluation["step"] == self.state.step
        self.saver.save(self.evaluation if known else None)

    def _once(self, sums: Tensor) -> Tensor:
        """Sums that all ranks of a `tp` group have alike, counted for one of them."""
        return sums if self.mesh.tp_index == 0 else torch.zeros_like(sums)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def _to_device(self, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor.to(self.mesh.device, non_blocking=True) for name, tensor in batch.items()}


def _detached(sums: Sums) -> Tensor:
    """Loss, count and the others as one vector, float64."""
    return torch.stack([value.detach().double() for value in (sums.loss, sums.count, *sums.others.values())])
