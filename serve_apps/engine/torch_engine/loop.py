"""The engine's thread: it alone touches the model, and hands out what every step gained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from serve_apps.engine.protocol import Delta, EngineConfig, SamplingParams, Statistics
from serve_apps.engine.torch_engine.answer import Answer
from serve_apps.engine.torch_engine.model import ModelFacts, eos_ids
from serve_apps.engine.torch_engine.options import TorchOptions
from serve_apps.engine.torch_engine.ranks import Ranks, device_of
from serve_apps.engine.torch_engine.runner import Runner, load_runner
from serve_apps.engine.torch_engine.sampling import Logprobs, Sampler, logprobs_of, sample
from serve_apps.engine.torch_engine.scheduler import Plan, Scheduler
from serve_apps.engine.torch_engine.sequence import Sequence as Row
from serve_apps.engine.torch_engine.step import Kind

Deliver = Callable[[list[tuple[str, Delta]]], None]


@dataclass(eq=False)
class _Request:
    sampler: Sampler
    answer: Answer


class StepLoop:
    """Runs steps while there are requests, and sleeps while there are none.

    `run` belongs to one thread; all other methods may be called from any and return at once.

    Args:
        deliver: called from the loop's thread after each step with what each request gained.
    """

    def __init__(
        self, config: EngineConfig, options: TorchOptions, facts: ModelFacts, tokenizer: Any, deliver: Deliver
    ) -> None:
        self._config = config
        self._options = options
        self._facts = facts
        self._deliver = deliver
        self._decode = _decoder(tokenizer)
        self._ranks = Ranks(0, config.tensor, config.max_batch, options) if config.tensor > 1 else None
        self._scheduler = Scheduler(config.max_batch, config.max_waiting, options.prefill_tokens)
        self._requests: dict[str, _Request] = {}
        self._eos_ids: frozenset[int] = frozenset()
        self._changed = threading.Condition()
        """Guards the scheduler and the requests, and wakes the thread."""
        self._stopping = False
        self._num_steps = 0
        self._num_generated = 0

    def run(self, master_addr: str | None, master_port: int | None, ready: Callable[[], None]) -> None:
        """Load the model, call `ready`, and step until `stop`.

        Raises:
            EngineError: another rank died or hangs.
        """
        # Here, because both hold for the calling thread alone.
        torch.set_num_threads(self._config.threads)
        device = device_of(0)
        try:
            if self._ranks is not None and master_addr is not None and master_port is not None:
                self._ranks.join(master_addr, master_port, device)
            runner = load_runner(self._config, self._facts, device, self._ranks)
            self._eos_ids = eos_ids(runner.model)
            ready()
            while self._wait():
                with self._changed:
                    plan = self._scheduler.schedule()
                if plan is not None:
                    self._step(runner, plan)
                elif self._ranks is not None:
                    self._ranks.send(Kind.IDLE)
            if self._ranks is not None:
                self._ranks.send(Kind.STOP)
        finally:
            if self._ranks is not None:
                self._ranks.leave()

    def add(self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Take a request; raises what `Scheduler.add` raises."""
        end = frozenset() if sampling.ignore_eos else self._eos_ids
        request = _Request(Sampler(sampling), Answer(self._decode, prompt_ids, sampling, self._eos_ids))
        with self._changed:
            self._scheduler.add(Row(request_id, prompt_ids, sampling.max_tokens, end))
            self._requests[request_id] = request
            self._changed.notify()

    def abort(self, request_id: str) -> Delta | None:
        """End a request; its last delta, or None when it is not there."""
        with self._changed:
            request = self._requests.pop(request_id, None)
            self._scheduler.abort(request_id)
            return None if request is None else request.answer.abort()

    def stop(self) -> None:
        """End the loop after the step that runs now."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def statistics(self) -> Statistics:
        with self._changed:
            return Statistics(
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                cached_tokens=self._scheduler.cached_tokens,
                cache_tokens=self._config.max_batch * self._facts.context_length,
                generated_tokens=self._num_generated,
                steps=self._num_steps,
            )

    def _wait(self) -> bool:
        """Sleep until there is something to do, or a heartbeat is due; False when the loop must end."""
        # Without other ranks nobody waits for a heartbeat.
        timeout_s = None if self._ranks is None else self._options.heartbeat_s
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._scheduler.has_work, timeout_s)
            return not self._stopping

    def _step(self, runner: Runner, plan: Plan) -> None:
        if self._ranks is not None:
            self._ranks.send(Kind.STEP, plan.step)
        logits = runner.run(plan.step)
        with self._changed:
            requests = [self._requests.get(sequence.request_id) for sequence in plan.sequences]
        sampled, logprobs = _choose(logits, requests)
        deltas = []
        with self._changed:
            self._num_steps += 1
            gained = set(self._scheduler.postprocess(plan, sampled))
            self._num_generated += len(gained)
            for row, sequence in enumerate(plan.sequences):
                request = requests[row]
                if request is None or sequence not in gained:
                    continue
                delta = request.answer.add(sampled[row], sequence.finish_reason, logprobs.get(row))
                if delta.finish_reason is not None:
                    self._scheduler.finish(sequence.request_id, delta.finish_reason)
                    del self._requests[sequence.request_id]
                deltas.append((sequence.request_id, delta))
        self._deliver(deltas)


_ABANDONED = Sampler(SamplingParams(temperature=0.0))
"""Chooses for rows whose request was aborted while the step ran; nobody sees what."""


def _choose(
    logits: torch.Tensor, requests: Sequence[_Request | None]
) -> tuple[list[int], dict[int, Logprobs]]:
    """The token of every row, and the log probabilities of the rows that want them."""
    with torch.inference_mode():
        sampled = sample(logits, [_ABANDONED if request is None else request.sampler for request in requests])
        wanted = {
            row: request.sampler.params.logprobs
            for row, request in enumerate(requests)
            if request is not None and request.sampler.params.logprobs is not None
        }
        if not wanted:
            return sampled, {}
        rows = list(wanted)
        described = logprobs_of(logits[rows], [sampled[row] for row in rows], list(wanted.values()))
        return sampled, dict(zip(rows, described, strict=True))


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """From token ids to text, without the special tokens, as directly as the tokenizer allows."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda ids: fast.decode(ids, skip_special_tokens=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
