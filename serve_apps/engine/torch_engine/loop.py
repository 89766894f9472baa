"""The engine's thread: it alone touches the model, and hands out what every step gained."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from serve_apps.engine.answer import Answer
from serve_apps.engine.bad_words import spellings
from serve_apps.engine.protocol import (
    AnswerError,
    Delta,
    EngineConfig,
    EngineError,
    SamplingParams,
    Statistics,
    TokenLogprob,
    WeightsError,
)
from serve_apps.engine.token_pieces import TokenPieces
from serve_apps.engine.torch_engine.block_pool import BlockPool
from serve_apps.engine.torch_engine.model import ModelFacts, eos_ids, read_tokenizer
from serve_apps.engine.torch_engine.pace import StepCosts, StepWork
from serve_apps.engine.torch_engine.prompt_scores import PromptScores, ScoredToken, note_scores
from serve_apps.engine.torch_engine.ranks import Ranks, device_of
from serve_apps.engine.torch_engine.runner import (
    Runner,
    load_runner,
    load_together,
    park_together,
    wake_together,
)
from serve_apps.engine.torch_engine.running_request import (
    ABANDONED,
    RunningRequest,
    choose,
    note_hidden,
)
from serve_apps.engine.torch_engine.sampling import Logprobs, Sampler
from serve_apps.engine.torch_engine.scheduler import Scheduler, StepPlan
from serve_apps.engine.torch_engine.sequence import TokenSequence
from serve_apps.engine.torch_engine.step import Kind, Want
from serve_apps.engine.torch_engine.structure import LateStructure, Structure, Structures
from serve_apps.engine.torch_engine.torch_options import TorchOptions

logger = logging.getLogger(__name__)

Gain = Delta | list[float] | AnswerError
"""What a request gained in a step: text, the mean hidden state of its prompt, or that it cannot go on."""
Deliver = Callable[[list[tuple[str, Gain]]], None]


class EngineLoop:
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
        self._tokenizer = tokenizer
        self._ranks = Ranks(0, config.tensor, config.max_batch, options) if config.tensor > 1 else None
        self._requests: dict[str, RunningRequest] = {}
        self._changes: deque[tuple[Callable[[Runner], None], Future[None]]] = deque()
        """What is done once the answers that have begun are finished."""
        self._parked = False
        self._changed = threading.Condition()
        """Guards the scheduler and the requests, and wakes the thread."""
        self._stopping = False
        self._over = False
        self._num_steps = 0
        self._num_generated = 0
        self._num_prompt = 0
        self._cache_bytes = 0
        self._costs = StepCosts()

    def run(self, master_addr: str | None, master_port: int | None, ready: Callable[[], None]) -> None:
        """Load the model, call `ready`, and step until `stop`.

        Raises:
            EngineError: another rank died or hangs.
        """
        # Here, because both hold for the calling thread alone.
        torch.set_num_threads(self._config.threads)
        device = device_of(0, self._config.device)
        try:
            if self._ranks is not None and master_addr is not None and master_port is not None:
                self._ranks.join(master_addr, master_port, device)
            runner = load_runner(self._config, self._facts, self._options, device, self._ranks)
            config, options = self._config, self._options
            pool = BlockPool(runner.num_blocks, options.block_size, config.prefix_caching)
            self._scheduler = Scheduler(
                pool,
                config.max_batch,
                config.max_waiting,
                options.batched_tokens,
                None if math.isinf(options.prefill_ms) else options.prefill_ms / 1000,
                self._costs,
            )
            self._cache_bytes = runner.cache_bytes
            self._describe(runner)
            ready()
            while self._wait():
                with self._changed:
                    plan = self._scheduler.schedule()
                if plan is not None:
                    self._step(runner, plan)
                elif self._changes:
                    self._make_change(runner)
                elif self._ranks is not None:
                    self._ranks.send(Kind.IDLE)
            if self._ranks is not None:
                self._ranks.send(Kind.STOP)
        finally:
            if self._ranks is not None:
                self._ranks.leave()
            with self._changed:
                self._over = True
            while self._changes:
                done = self._changes.popleft()[1]
                if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
                    done.set_exception(WeightsError("the engine has stopped"))

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int,
        structure: Structure | LateStructure | None,
        cache_salt: str = "",
    ) -> None:
        """Take a request; raises what `Scheduler.add` and `spellings` raise."""
        end_ids = self._eos_ids | frozenset(sampling.stop_token_ids)
        bad_words = spellings(sampling.bad_words, self._tokenizer, self._facts.vocab_size)
        sampler = Sampler(sampling, prompt_ids, end_ids, bad_words, structure)
        answer = Answer(self._tokenizer, prompt_ids, sampling, self._piece)
        request = RunningRequest(sampler, answer)
        if sampling.prompt_logprobs is not None:
            request.scores = PromptScores(prompt_ids, sampling.prompt_logprobs)
        scored = request.scores is not None
        stops = frozenset(sampling.stop_token_ids) if sampling.ignore_eos else end_ids
        sequence = TokenSequence(
            request_id, prompt_ids, sampling.max_tokens, stops, priority, scored, cache_salt
        )
        with self._changed:
            self._scheduler.add(sequence)
            self._requests[request_id] = request
            self._changed.notify()

    def structure(self, sampling: SamplingParams) -> Structure | LateStructure | None:
        """What keeps an answer to a structure, see `Structures.make`."""
        return self._structures.make(sampling)

    def embed(self, request_id: str, prompt_ids: Sequence[int]) -> None:
        """Take a request for the mean of its prompt's last hidden states."""
        with self._changed:
            self._scheduler.add(TokenSequence(request_id, prompt_ids, max_tokens=0))
            self._requests[request_id] = RunningRequest(ABANDONED)
            self._changed.notify()

    def abort(self, request_id: str) -> Delta | None:
        """End a request; its last delta, or None when it is not there."""
        with self._changed:
            request = self._requests.pop(request_id, None)
            if request is None:
                return None
            self._scheduler.abort(request_id)
            return Delta(finish_reason="abort") if request.answer is None else request.answer.add((), "abort")

    def load(self, model_path: str) -> Future[None]:
        """Change to other weights once the answers that have begun are finished."""
        return self._ask_for(lambda runner: self._load(runner, model_path))

    def park(self) -> Future[None]:
        """Free device and KV cache once the answers that have begun are finished; others wait for `wake`."""
        return self._ask_for(self._park)

    def wake(self) -> Future[None]:
        """Go on after `park`; the loop ends where that cannot be."""
        return self._ask_for(self._wake)

    def _ask_for(self, change: Callable[[Runner], None]) -> Future[None]:
        done: Future[None] = Future()
        with self._changed:
            if self._over:  # nobody would make it any more
                done.set_exception(EngineError("the engine has ended"))
                return done
            self._changes.append((change, done))
            self._scheduler.hold()
            self._changed.notify()
        return done

    def stop(self) -> None:
        """End the loop after the step that runs now."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def statistics(self) -> Statistics:
        with self._changed:
            scheduler = self._scheduler
            pool = scheduler.pool
            return Statistics(
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                cache_use=pool.num_used / pool.num_blocks,
                cache_tokens=pool.num_blocks * pool.block_size,
                cache_bytes=self._cache_bytes,
                preempted=scheduler.num_preempted,
                prompt_tokens=self._num_prompt,
                found_tokens=scheduler.found_tokens,
                generated_tokens=self._num_generated,
                steps=self._num_steps,
            )

    def _describe(self, runner: Runner) -> None:
        """Know the model's own words: what ends an answer, and how tokens are written."""
        self._eos_ids = eos_ids(runner.model, self._tokenizer)
        pieces = TokenPieces(self._tokenizer)
        self._piece = lambda token_id: pieces.of(token_id)[1]
        self._structures = Structures(self._tokenizer, self._facts.vocab_size, self._eos_ids)

    def _wait(self) -> bool:
        """Sleep until there is something to do, or a heartbeat is due; False when the loop must end."""
        # Without other ranks nobody waits for a heartbeat.
        timeout_s = None if self._ranks is None else self._options.heartbeat_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or bool(self._changes) or self._scheduler.has_work, timeout_s
            )
            return not self._stopping

    def _make_change(self, runner: Runner) -> None:
        # It stays in the queue meanwhile: where a rank is lost, whoever waits for it hears of that too.
        change, done = self._changes[0]
        if done.set_running_or_notify_cancel():
            try:
                change(runner)
            except WeightsError as error:
                done.set_exception(error)
            except EngineError as error:
                done.set_exception(error)
                raise
            else:
                done.set_result(None)
        with self._changed:
            self._changes.popleft()
            if not self._changes and not self._parked:
                self._scheduler.resume()

    def _park(self, runner: Runner) -> None:
        if self._ranks is not None:
            self._ranks.send(Kind.PARK)
        park_together(runner, self._ranks)
        self._parked = True

    def _wake(self, runner: Runner) -> None:
        if self._ranks is not None:
            self._ranks.send(Kind.WAKE)
        wake_together(runner, self._ranks)
        self._parked = False

    def _load(self, runner: Runner, model_path: str) -> None:
        try:
            tokenizer = read_tokenizer(model_path)
        except EngineError as error:
            raise WeightsError(str(error)) from error
        if self._ranks is not None:
            self._ranks.send(Kind.LOAD, text=model_path)
        load_together(runner, model_path, self._ranks)
        self._tokenizer = tokenizer
        self._describe(runner)

    def _step(self, runner: Runner, plan: StepPlan) -> None:
        begin = time.perf_counter()
        if self._ranks is not None:
            self._ranks.send(Kind.STEP, plan.step)
        with self._changed:
            requests = [self._requests.get(sequence.request_id) for sequence in plan.sequences]

        def note(places: Sequence[ScoredToken], logits: torch.Tensor) -> None:
            takers = [requests[place.row] for place in places]
            note_scores(logits, places, [None if taker is None else taker.scores for taker in takers])

        outputs = runner.run(plan.step, note)
        wanting = [number for number, row in enumerate(plan.step.rows) if row.want is Want.LOGITS]
        chosen, logprobs = choose(outputs.logits, [requests[number] for number in wanting])
        if (left_s := begin + self._options.least_step_ms / 1000 - time.perf_counter()) > 0:
            time.sleep(left_s)
        self._costs.observe(StepWork.of(plan.step), time.perf_counter() - begin)
        sampled: list[int | None] = [None] * len(requests)
        errors: dict[int, AnswerError] = {}
        for number, token in zip(wanting, chosen, strict=True):
            if isinstance(token, AnswerError):
                errors[number] = token
            else:
                sampled[number] = token
        note_hidden(outputs, plan, requests)
        gains: list[tuple[str, Gain]] = []
        with self._changed:
            self._num_steps += 1
            gained = set(self._scheduler.postprocess(plan, sampled))
            for number, (sequence, request) in enumerate(zip(plan.sequences, requests, strict=True)):
                if request is None or not (sequence in gained or number in errors):
                    continue
                gain: Gain
                try:
                    if number in errors:
                        raise errors[number]
                    gain = self._gain(request, sequence, sampled[number], logprobs)
                except Exception as error:  # noqa: BLE001 - whatever it is, the other requests go on
                    gain = self._fail(sequence, error)
                gains.append((sequence.request_id, gain))
        self._deliver(gains)

    def _fail(self, sequence: TokenSequence, error: Exception) -> AnswerError:
        """End one request that cannot go on; what its reader learns."""
        self._scheduler.abort(sequence.request_id)
        self._requests.pop(sequence.request_id, None)
        if isinstance(error, AnswerError):
            return error
        logger.error("request %s failed", sequence.request_id, exc_info=error)
        return AnswerError(f"the answer could not be put into words: {error!r}", own_fault=False)

    def _gain(
        self,
        request: RunningRequest,
        sequence: TokenSequence,
        token_id: int | None,
        logprobs: dict[RunningRequest, Logprobs],
    ) -> Gain:
        if len(sequence.output_ids) < 2:
            self._num_prompt += len(sequence.prompt_ids)
        if request.answer is None:
            del self._requests[sequence.request_id]
            assert isinstance(request.hidden, torch.Tensor)
            mean = request.hidden / len(sequence.prompt_ids)
            if not bool(mean.isfinite().all()):
                raise AnswerError("the model's hidden states are not finite", own_fault=False)
            return mean.tolist()
        if token_id is None:
            delta = Delta(finish_reason=sequence.finish_reason)
        else:
            self._num_generated += 1
            request.sampler.take(token_id)
            found = logprobs.get(request)
            told = () if found is None else (TokenLogprob(token_id, found.chosen, found.top),)
            delta = request.answer.add((token_id,), sequence.finish_reason, told)
        if len(sequence.output_ids) < 2:
            scores = () if request.scores is None else request.scores.take()
            delta = replace(delta, prompt_logprobs=scores, cached_tokens=sequence.cached)
        if delta.finish_reason is not None:
            self._scheduler.finish(sequence.request_id, delta.finish_reason)
            del self._requests[sequence.request_id]
        return delta
