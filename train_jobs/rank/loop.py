"""The step loop of one rank."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from train_jobs.checkpoint.saver import CheckpointSaver
from train_jobs.checkpoint.state import TrainingState
from train_jobs.data.loader import BatchLoader, evaluation_batches
from train_jobs.data.order import Place
from train_jobs.data.source import Batch, Samples, StreamSamples, as_samples, has_samples
from train_jobs.elastic.quorum import Left, Quorum
from train_jobs.errors import LossError
from train_jobs.metering.meter import Meter
from train_jobs.metering.pace import Pace
from train_jobs.metering.stragglers import Change
from train_jobs.optimization.loss_guard import BadStep
from train_jobs.optimization.optimizers import set_learning_rate
from train_jobs.optimization.schedules import learning_rate
from train_jobs.parallel.model import ParallelModel
from train_jobs.tasks.task import Task
from train_jobs.watch.progress import Progress

_Saved = list[tuple[Tensor, Tensor]]
"""Tensors, each with a copy of what it was."""


class Reporter(Protocol):
    """Where a rank says what it did; all but rank 0 say nothing."""

    def metric(self, line: dict[str, Any]) -> bool:
        """Log one step, unless it has been logged; True when the job has been asked to stop."""

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
        pace: Pace | None,
        reporter: Reporter,
        progress: Progress,
    ) -> None:
        self.config = config
        self.attempt = attempt
        self.task = task
        self.parallel = parallel
        self.state = state
        self.saver = saver
        self.quorum = quorum
        self.meter = meter
        self.guard = state.guard
        self.pace = pace
        self.reporter = reporter
        self.progress = progress
        self.mesh = parallel.mesh
        self.loader = state.loader
        self.held_out = None if config.evaluate.every_steps is None else self._held_out()

    def run(self) -> Literal["finished", "stopped", "left"]:
        """Returns with the last step saved, on all ranks alike; or when the other groups go on without it."""
        try:
            self._run()
        except Left as goodbye:
            with self.progress.saving():
                if goodbye.last and self.saver.last != self.state.step:
                    self.saver.save()
                self.saver.finish()
            return "left"
        finally:
            self.loader.close()
        finished = self.state.step == self.config.steps
        if self.saver.last != self.state.step and self.state.step:
            self._save()
        if finished and self.held_out is not None:
            with self.progress.saving():
                self.saver.wait()  # whatever the evaluation comes to, what was trained is kept
            self.evaluate()
        with self.progress.saving():
            self.saver.finish()
            self.mesh.meet()  # rank 0 may have older checkpoints to clear away
        totals = self.meter.totals()
        if totals is not None and self.quorum.leads:
            self.reporter.event("measured", attempt=self.attempt, **totals)
        return "finished" if finished else "stopped"

    def _run(self) -> None:
        """All steps but the last evaluation and the last save."""
        stop, led = False, self.quorum.leads
        if self.state.step == 0 and self.guard.goes_back:
            self._save()
        while self.state.step < self.config.steps and not stop:
            before = self.state.step
            stop = self.step()
            self.saver.poll()
            step = self.state.step
            if step <= before:
                continue  # it went back to a checkpoint
            took_over, led = self.quorum.leads and not led, self.quorum.leads
            due = self._due(self.config.checkpoint.every_steps)
            # The group that wrote the checkpoints may have been lost while it wrote one.
            if (due or (took_over and self._lacks_last())) and step < self.config.steps:
                self._save()
            if self._due(self.config.evaluate.every_steps) and step < self.config.steps:
                self.evaluate()

    def _held_out(self) -> Samples | StreamSamples:
        """What is evaluated on, looked at before the first step.

        Raises:
            RequestError: there is none.
        """
        held_out = as_samples(self.task.samples(held_out=True), self.task.collate)
        if not has_samples(held_out):
            raise RequestError(
                "the task gives no held-out sample to evaluate on; evaluate.every_steps: null needs none"
            )
        return held_out

    def rehearse(self) -> None:
        """Forward and backward on a few samples that do not count, so that the first step is not the slowest.

        Kernels are chosen, memory is allocated and blocks are compiled here.
        """
        randomness = self.state.randomness()
        buffers = self._buffers()
        if isinstance(self.loader, BatchLoader):
            samples = self.loader.samples
            indices = [index % len(samples) for index in range(self.config.batch.micro)]
            self._gradients([samples.batch(indices, None)], 0.0)
            self.parallel.drop_gradients()
        if self.pace is not None:
            self.pace.clock.forget()
        for buffer, value in buffers:
            buffer.copy_(value)
        self.state.restore_randomness(randomness)

    def step(self) -> bool:
        """One optimizer step of the whole job; True when all ranks are to stop after it."""
        # Kernels are compiled in the first step, for as long as that takes.
        with (
            nullcontext() if self._has_stepped else self.progress.starting(),
            self.meter.step(may_profile=self.quorum.leads),
        ):
            line, stop = self._step()
        if not self._has_stepped:
            self.mesh.limit_steps(self.config.recovery.hang_timeout_s)
        self._has_stepped = True
        if line is None:
            self._unsaid = None
            return stop
        figures = self.meter.line(line["samples"], line["tokens"])
        if self.quorum.leads:
            if self._unsaid is not None:  # the group that led before may not have lived to say it
                self.reporter.metric(self._unsaid)
            self._asked_to_stop = self.reporter.metric({**line, **figures})
        self._unsaid = None if self.quorum.leads else {**line, **figures}
        return stop

    _has_stepped = False  # in this attempt
    _unsaid: dict[str, Any] | None = None  # the figures of the last step, where another group says them
    _asked_to_stop = False  # what rank 0 heard after the last step; the others learn it with the next loss

    def _step(self) -> tuple[dict[str, Any] | None, bool]:
        """What was computed in the step, None where the job went back; and whether all ranks are to stop."""
        (loss, count, stop), buffers = self._compute()
        step, scale = self.state.step, self.state.loss_scale
        if count == 0:
            raise LossError(f"nothing counts in the global batch of step {step + 1}")
        loss /= count
        rate = learning_rate(self.config.optimizer, step, self.config.steps)
        bad = self.guard.look(loss)
        norm: float | None = None
        if bad is not None and bad.policy == "warn":
            self._say("loss_spike", step=step + 1, loss=loss, reason=bad.reason)
            bad = None
        if bad is None:
            set_learning_rate(self.state.optimizer, rate)
            norm = self.parallel.update(
                self.state.optimizer,
                self._most / count / scale.value,
                self.config.optimizer.max_grad_norm,
                self._hold,
            )
            if not math.isfinite(norm) and (not scale.enabled or scale.exhausted):
                bad = self.guard.look_at_norm(norm)
        self.parallel.drop_gradients()
        if bad is not None and bad.policy == "go_back":
            self._go_back(bad)
            return None, stop > 0
        if bad is not None:
            self._skip(bad, buffers)
        finite = norm is not None and math.isfinite(norm)
        self.state.step = step + 1
        line = {
            "attempt": self.attempt,
            "step": self.state.step,
            "loss": loss if math.isfinite(loss) else None,
            "learning_rate": rate,
            "grad_norm": norm if finite else None,
            "world_size": self.quorum.world_size,
            "samples": int(count) if self.task.unit == "samples" else self.config.batch.global_size,
            "tokens": int(count) if self.task.unit == "tokens" else None,
        }
        if self.quorum.began > 1:  # several groups, of which none had a state any more
            line["began"] = self.quorum.began
        if self.guard.went_back:
            line["went_back"] = self.guard.went_back
        if scale.enabled:
            line["loss_scale"] = scale.shown
        if scale.enabled or bad is not None:
            line["skipped"] = not finite
        if bad is None:
            scale.update(finite)
            if finite:
                self.guard.took(loss)
        return line, stop > 0

    def _compute(self) -> tuple[tuple[float, float, float], _Saved]:
        """Forward, backward and the totals of a step, again until they count; and the buffers of before."""
        while True:
            place = self.quorum.start()
            batches = [] if place is None else self.loader.step(self.guard.batch(self.state.step), place)
            # A group that has yet to take its state passes nothing forward.
            buffers = self._buffers() if self.guard.skips and place is not None else []
            mine = self._gradients(
                batches, self.state.loss_scale.value * self.parallel.num_averaged / self._most
            )
            totals = self._totals(mine, len(batches))
            if totals is not None:
                return totals, buffers
            self.parallel.drop_gradients()
            self.quorum.drop()

    @property
    def _most(self) -> int:
        """What a global batch counts at most."""
        return self.config.batch.global_size * self.loader.targets_per_sample

    def _skip(self, bad: BadStep, buffers: _Saved) -> None:
        """Leave the model as it was before the step; the data and the schedule go on."""
        step = self.state.step
        if bad.policy == "stop":
            raise LossError(f"{bad.reason} in step {step + 1}")
        self.guard.skip(bad, step)
        for buffer, value in buffers:
            buffer.copy_(value)
        self._say("step_skipped", step=step + 1, reason=bad.reason)

    def _go_back(self, bad: BadStep) -> None:
        """Go on from the newest good checkpoint, without the batch of this step."""
        step, went_back = self.state.step, self.guard.went_back
        self.guard.go_back(bad, step)
        with self.progress.starting():
            self._hold()
            with self.progress.saving():
                self.saver.finish()  # a save under way may be the checkpoint to go back to
            self.quorum.forget()
            self.quorum.start()
        if self.guard.went_back > went_back:  # else a group that knows nothing of it had a newer state
            passed_over = list(self.guard.passed_over)
            self._say(
                "went_back", step=step + 1, to=self.state.step, reason=bad.reason, passed_over=passed_over
            )

    def _say(self, kind: str, **facts: Any) -> None:
        if self.quorum.leads:
            self.reporter.event(kind, attempt=self.attempt, **facts)

    def _buffers(self) -> _Saved:
        """What forward passes change, with copies of it."""
        return [(buffer, buffer.clone()) for buffer in self.parallel.module.buffers()]

    def _hold(self) -> None:
        """Wait until whoever copies or sends the state has done so."""
        with self.progress.saving():
            self.saver.hold()
            self.quorum.hold()

    def _gradients(self, batches: list[Batch], factor: float) -> Tensor:
        """Forward and backward of this rank's samples; returns its summed loss and what counted."""
        module = self.parallel.module
        module.train()
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if last:
                self.quorum.last_backward()
            with self.parallel.micro_batch(self._to_device(batch), last=last) as mine:
                with self.parallel.autocast(), self._timed():
                    result = self.task.loss(module, mine)
                self.parallel.backward(result.loss * factor)
            sums += result.vector()[:2]
            self.progress.tick()
        return sums

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.pace is None else self.pace.clock.micro_batch()

    def _totals(self, mine: Tensor, micro_batches: int) -> tuple[float, float, float] | None:
        """Summed loss, what counted, and how many ask to stop, over the whole global batch.

        None where the step has to be done again.

        Args:
            micro_batches: that this rank took.
        """
        beside = [float(self._asked_to_stop)]
        if self.pace is not None:
            beside += self.pace.row(self.quorum.index, self.quorum.world_size)
        summed = self.quorum.total(torch.cat((self._once(mine), mine.new_tensor(beside))))
        if summed is None:
            return None
        loss, count, stop, *seconds = summed.tolist()
        if self.pace is not None:
            for change in self.pace.take_in(self.quorum.ranks, seconds, micro_batches):
                self._say_of_straggler(change)
        return loss, count, stop

    def _say_of_straggler(self, change: Change) -> None:
        group, rank = change.rank
        self._say(
            "straggler" if change.begins else "straggler_over",
            step=self.state.step + 1,
            **({} if group is None else {"group": group}),
            rank=rank,
            times_slower=change.times_slower,
            steps=change.steps,
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Evaluate every held-out sample once, each rank its share; all ranks get the same means."""
        self.parallel.module.eval()
        self.parallel.agree_on_statistics()
        place = self.quorum.place
        assert place is not None, "a step was done"
        mine, names = self._evaluated(place)
        totals = self.quorum.total(mine)
        if totals is None:
            # A group was lost on the way; the next step finds another quorum, and this group evaluates all.
            shape = self.mesh.shape
            totals, names = self._evaluated(Place(self.mesh.data_index, shape.num_data_ranks))
            dist.all_reduce(totals)
        loss, count, *others = totals.tolist()
        means = {name: total / count for name, total in zip(("loss", *names), (loss, *others), strict=True)}
        if self.task.unit == "tokens":
            means["perplexity"] = math.exp(min(means["loss"], 700.0))
        saves = self.config.checkpoint
        if saves.keep_best and saves.metric not in means:
            raise RequestError(
                f"checkpoint.metric: this task's evaluations have no `{saves.metric}`; they have "
                f"{', '.join(means)}"
            )
        evaluation = {"step": self.state.step, **means, self.task.unit: int(count)}
        if self.quorum.leads:
            self.reporter.event("evaluated", attempt=self.attempt, **evaluation)
            self.saver.evaluated(evaluation)
        return evaluation

    def _evaluated(self, place: Place) -> tuple[Tensor, list[str]]:
        """Loss, count and the task's other sums over a place's share of the held-out samples; their names."""
        totals: Tensor | None = None
        names: list[str] = []
        assert self.held_out is not None, "the job evaluates"
        for batch, counts in evaluation_batches(self.held_out, place, self.config.batch.micro):
            with self.parallel.micro_batch(self._to_device(batch)) as part, self.parallel.autocast():
                result = self.task.loss(self.parallel.module, part)
            sums = result.vector() if counts else torch.zeros_like(result.vector())
            names = list(result.others)
            totals = sums if totals is None else totals + sums
            self.progress.tick()
        assert totals is not None, "there are held-out samples"
        return self._once(totals), names

    def _save(self) -> None:
        """Save this step."""
        if self.quorum.leads:
            with self.progress.saving():
                self.saver.save()
        else:
            self.saver.last = self.state.step  # another group saves it

    def _lacks_last(self) -> bool:
        with self.progress.saving():
            return self.saver.lacks_last()

    def _once(self, sums: Tensor) -> Tensor:
        """Sums that all ranks of a `tp` group have alike, counted for one of them."""
        return sums if self.mesh.tp_index == 0 else torch.zeros_like(sums)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def _to_device(self, batch: Batch) -> dict[str, Tensor]:
        return {name: tensor.to(self.mesh.device, non_blocking=True) for name, tensor in batch.items()}
