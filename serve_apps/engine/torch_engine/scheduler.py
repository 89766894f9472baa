"""Which requests run in the next forward pass; pure Python, so that it can be read and tested alone.

Continuous batching after Orca (Yu et al., OSDI 2022): a request joins at any step and leaves at any step.
The rows of the running requests are always 0..n-1, so that every rank's cache is read as one slice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from serve_apps.engine.protocol import FinishReason, QueueFullError
from serve_apps.engine.torch_engine.sequence import Sequence
from serve_apps.engine.torch_engine.step import Move, Step


@dataclass(frozen=True, slots=True)
class Plan:
    """The next forward pass, with the sequence of each of its rows."""

    step: Step
    sequences: tuple[Sequence, ...]


class Scheduler:
    """Decides, step by step, which sequences run; first come, first served.

    Prompts go before answers, because a wide batch is what makes decoding cheap. Those that run cannot
    starve for it: after at most `max_batch` prompts the batch is full, and every step that follows decodes.

    Args:
        max_batch: most sequences that run at once.
        max_waiting: most sequences that wait beside those.
        prefill_tokens: most tokens of one prefill, counted with the padding to its longest prompt. A
            longer prompt runs alone.
    """

    def __init__(self, max_batch: int, max_waiting: int, prefill_tokens: int) -> None:
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.prefill_tokens = prefill_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """In the order of their rows; a sequence that ended keeps its row until the next `schedule`."""
        self._by_id: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn.

        Raises:
            QueueFullError: as many wait as may wait.
            ValueError: its request id is in use.
        """
        if sequence.request_id in self._by_id:
            raise ValueError(f"request {sequence.request_id} is already in the engine")
        # Those that will get a row at the next step do not wait for anything.
        free = self.max_batch - self.num_running
        if len(self._waiting) >= self.max_waiting + free:
            raise QueueFullError(
                f"{self.num_running} requests run and {self.num_waiting} wait, which is as many as may wait; "
                "try again later"
            )
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def schedule(self) -> Plan | None:
        """The next forward pass, or None when there is nothing to do."""
        moves = self._compact()
        prompts = self._admit()
        if prompts:
            first_row = len(self._running)
            for row, sequence in enumerate(prompts, first_row):
                sequence.row = row
            self._running += prompts
            tokens = tuple(sequence.prompt_ids for sequence in prompts)
            return Plan(Step(moves, first_row, tokens, (0,) * len(prompts)), tuple(prompts))
        if not self._running:
            return None
        decoding = tuple(self._running)
        return Plan(
            Step(
                moves,
                first_row=0,
                tokens=tuple((sequence.output_ids[-1],) for sequence in decoding),
                starts=tuple(sequence.cached for sequence in decoding),
            ),
            decoding,
        )

    def postprocess(self, plan: Plan, sampled: list[int]) -> list[Sequence]:
        """Give each sequence of the plan its token; those that ended meanwhile take none.

        Returns those that took one.
        """
        gained = []
        for sequence, tokens, token_id in zip(plan.sequences, plan.step.tokens, sampled, strict=True):
            sequence.cached += len(tokens)
            if sequence.ended:
                continue
            gained.append(sequence)
            if sequence.append(token_id) is not None:
                del self._by_id[sequence.request_id]
        return gained

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """End a sequence for a reason outside its tokens; its row is free at the next `schedule`."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return None
        sequence.finish_reason = reason
        if sequence.row is None:
            self._waiting.remove(sequence)
        return sequence

    def abort(self, request_id: str) -> Sequence | None:
        """End a sequence because nobody wants it any more; None when it is not there."""
        return self.finish(request_id, "abort")

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return a plan."""
        return bool(self._waiting) or self.num_running > 0

    @property
    def num_running(self) -> int:
        return sum(not sequence.ended for sequence in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def cached_tokens(self) -> int:
        return sum(sequence.cached for sequence in self._running if not sequence.ended)

    def _compact(self) -> tuple[Move, ...]:
        """Close the gaps that ended sequences left: the last row moves into the first hole, and so on."""
        moves = []
        hole = 0
        while hole < len(self._running):
            if not self._running[hole].ended:
                hole += 1
                continue
            last = self._running.pop()
            if last.ended:
                continue
            source, target = len(self._running), hole
            self._running[target] = last
            last.row = target
            moves.append(Move(source, target, last.cached))
        return tuple(moves)

    def _admit(self) -> list[Sequence]:
        """Take as many of the waiting, in their order, as rows and the token budget allow."""
        prompts: list[Sequence] = []
        longest = 0
        while self._waiting and len(self._running) + len(prompts) < self.max_batch:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if prompts and longest * (len(prompts) + 1) > self.prefill_tokens:
                break
            prompts.append(self._waiting.popleft())
        return prompts
