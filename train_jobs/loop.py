"""The step loop of one rank."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from cluster.config.train_section import TrainJobConfig
from train_jobs.checkpoint.saver import CheckpointSaver
from train_jobs.checkpoint.state import TrainingState
from train_jobs.data.order import Place, SampleOrder, evaluation_share
from train_jobs.data.samples import PackedSamples
from train_jobs.errors import LossError
from train_jobs.optimization import clip_gradients
from train_jobs.parallel.strategy import Strategy
from train_jobs.tasks.causal_lm import CausalLM


class Reporter(Protocol):
    """Where a rank says what it did; all but rank 0 say nothing."""

    def metric(self, line: dict[str, Any]) -> bool:
        """Log one step; True when the job has been asked to stop."""

    def event(self, kind: str, **facts: Any) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """Loss over the held-out text: every token but the very first counted exactly once."""

    step: int
    loss: float
    """Mean cross-entropy in nats a token."""
    perplexity: float
    tokens: int


class StepLoop:
    """Steps, evaluates and saves until the job's last step, or until it is asked to stop.

    The gradient of a step is that of the mean loss over all tokens of the global batch: each micro-batch's
    summed loss is divided by the step's number of tokens, and multiplied by the number of ranks because
    strategies average over ranks.
    """

    def __init__(
        self,
        *,
        config: TrainJobConfig,
        attempt: int,
        task: CausalLM,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        state: TrainingState,
        saver: CheckpointSaver,
        train: PackedSamples,
        held_out: PackedSamples,
        reporter: Reporter,
        device: torch.device,
    ) -> None:
        self.config = config
        self.attempt = attempt
        self.task = task
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.state = state
        self.saver = saver
        self.train = train
        self.held_out = held_out
        self.reporter = reporter
        self.device = device
        self.place = Place(dist.get_rank(), dist.get_world_size())
        self.order = SampleOrder(len(train), config.batch.global_size, config.batch.micro, config.seed)
        self.evaluated_at: int | None = None

    def run(self) -> Literal["finished", "stopped"]:
        """Returns with the last step saved, on all ranks alike."""
        stop = False
        while self.state.step < self.config.steps and not stop:
            stop = self.step()
            self.saver.poll()
            step = self.state.step
            if self._due(self.config.evaluate.every_steps) and step < self.config.steps:
                self.evaluate()
            if self._due(self.config.checkpoint.every_steps):
                self.saver.save()
        if self.saver.last != self.state.step and self.state.step:
            self.saver.save()
        self.saver.finish()
        if self.state.step < self.config.steps:
            return "stopped"
        self.evaluate()
        return "finished"

    def step(self) -> bool:
        """One optimizer step of the whole job; True when all ranks are to stop after it."""
        began = time.perf_counter()
        step = self.state.step
        batches = self.order.micro_batches(step, self.place)
        num_tokens = self.config.batch.global_size * self.train.length
        self.model.train()
        summed = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, samples in enumerate(batches):
            inputs, targets = self._to_device(self.train, samples)
            with self.strategy.synchronize(self.model, last=index == len(batches) - 1):
                with self.strategy.autocast():
                    loss, _ = self.task.loss(self.model, inputs, targets)
                (loss * (self.place.size / num_tokens)).backward()
            summed += loss.detach()
        norm = clip_gradients(self.model.parameters(), self.config.optimizer.max_grad_norm)
        if not math.isfinite(norm):  # the same on all ranks; the model is still whole
            raise LossError(f"the norm of the gradient is {norm} in step {step + 1}")
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.state.step = step + 1
        return self._share(summed, num_tokens, norm, learning_rate, began)

    def _share(
        self, summed: Tensor, num_tokens: int, norm: float, learning_rate: float, began: float
    ) -> bool:
        """Sum the loss over the ranks, log the step, and agree on whether to stop."""
        totals = torch.stack([summed, summed.new_tensor(float(self._asked_to_stop))])
        dist.all_reduce(totals)
        loss = totals[0].item() / num_tokens
        if not math.isfinite(loss):
            raise LossError(f"the loss is {loss} in step {self.state.step} (learning rate {learning_rate:g})")
        self._asked_to_stop = self.reporter.metric(
            {
                "attempt": self.attempt,
                "step": self.state.step,
                "loss": loss,
                "learning_rate": learning_rate,
                "grad_norm": norm,
                "world_size": self.place.size,
                "samples": self.config.batch.global_size,
                "tokens": num_tokens,
                "step_s": round(time.perf_counter() - began, 6),
            }
        )
        return totals[1].item() > 0

    _asked_to_stop = False  # what rank 0 heard after the last step; the others learn it with the next loss

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Evaluate every held-out token once, each rank its share; all ranks get the same result."""
        if self.evaluated_at == self.state.step:
            raise RuntimeError("evaluated twice at one step")
        self.evaluated_at = self.state.step
        self.model.eval()
        micro = self.config.batch.micro
        mine = list(evaluation_share(len(self.held_out), self.place))
        # Sharded models gather parameters in every forward: all ranks must run equally many, so that one
        # with fewer samples runs on empty ones, whose targets do not count.
        most = -(-len(self.held_out) // self.place.size)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, most, micro):
            samples = mine[start : start + micro]
            inputs, targets = self._to_device(self.held_out, samples or [0])
            if not samples:
                targets.fill_(-100)
            with self.strategy.autocast():
                loss, count = self.task.loss(self.model, inputs, targets)
            totals += torch.stack([loss.double(), loss.new_tensor(count, dtype=torch.float64)])
        dist.all_reduce(totals)
        mean = float(totals[0] / totals[1])
        result = Evaluation(self.state.step, mean, math.exp(min(mean, 700.0)), int(totals[1]))
        self.reporter.event(
            "evaluated",
            attempt=self.attempt,
            step=result.step,
            loss=result.loss,
            perplexity=result.perplexity,
            tokens=result.tokens,
        )
        return result

    def _due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def _to_device(self, samples: PackedSamples, indices: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = samples.batch(indices)
        return torch.from_numpy(inputs).to(self.device), torch.from_numpy(targets).to(self.device)
