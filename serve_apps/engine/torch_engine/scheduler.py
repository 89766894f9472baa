"""Which tokens of which requests are computed in the next forward pass; pure Python.

Continuous batching after Orca (Yu et al., OSDI 2022): a request joins at any step and leaves at any step. A
long prompt is read in pieces beside the answers of the others, so that it does not stop them (Sarathi-Serve,
Agrawal et al., OSDI 2024); what bounds a piece is the time that it takes. Where the KV cache has no room,
the request whose turn is last gives up its place and is computed again later, with the tokens that it has:
nothing of its answer changes.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from serve_apps.engine.protocol import FinishReason, QueueFullError
from serve_apps.engine.torch_engine.block_pool import BlockPool, Digests, start_of
from serve_apps.engine.torch_engine.pace import Allowance, StepCosts
from serve_apps.engine.torch_engine.sequence import TokenSequence
from serve_apps.engine.torch_engine.step import Row, Step, Want


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next forward pass, with the sequence of each of its rows; those that decode come first."""

    step: Step
    sequences: tuple[TokenSequence, ...]


class Scheduler:
    """Decides, step by step, which sequences run: by priority, and among equals first come, first served.

    Args:
        pool: the blocks of the KV cache; one sequence alone always fits in it.
        max_batch: most sequences that run at once.
        max_waiting: most sequences that wait beside those.
        batched_tokens: most tokens of one step. A running answer always gets its one.
        prefill_s: seconds that the prompts of one step may take beside running answers. None: any number.
        costs: what steps take, by which those seconds become tokens; whoever runs the steps measures them.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_batch: int,
        max_waiting: int,
        batched_tokens: int,
        prefill_s: float | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.batched_tokens = batched_tokens
        self.prefill_s = prefill_s
        self.costs = StepCosts() if costs is None else costs
        self.num_preempted = 0
        """Times that a sequence gave up its place, since the start."""
        self.found_tokens = 0
        """Tokens of prompts that were in the cache already, since the start."""
        self.held = False
        """Only sequences that have tokens of their answers are scheduled: the model is about to change."""
        self._waiting: list[TokenSequence] = []
        self._running: list[TokenSequence] = []
        """Both in the order of their turns."""
        self._by_id: dict[str, TokenSequence] = {}
        self._digests: dict[str, Digests] = {}
        self._told: dict[TokenSequence, int] = {}
        """Of each running sequence: how many of its blocks the ranks know."""
        self._slots = list(range(max_batch - 1, -1, -1))
        self._arrivals = 0

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for its turn.

        Raises:
            QueueFullError: as many wait as may wait.
            ValueError: its request id is in use.
        """
        if sequence.request_id in self._by_id:
            raise ValueError(f"request {sequence.request_id} is already in the engine")
        # Those that will run from the next step on do not wait for anything.
        free = max(0, self.max_batch - self.num_running)
        if len(self._waiting) >= self.max_waiting + free:
            raise QueueFullError(
                f"{self.num_running} requests run and {self.num_waiting} wait, which is as many as may wait; "
                "try again later"
            )
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._by_id[sequence.request_id] = sequence
        self._digests[sequence.request_id] = Digests(self.pool.block_size, start_of(sequence.cache_salt))
        insort(self._waiting, sequence, key=_turn)

    def schedule(self) -> StepPlan | None:
        """The next forward pass, or None when there is nothing to do."""
        if self.held:
            for sequence in [sequence for sequence in self._running if not sequence.output_ids]:
                self._vacate(sequence)
                insort(self._waiting, sequence, key=_turn)
        for sequence in list(self._running):
            # One whose turn is earlier may have taken its place meanwhile.
            if sequence.slot is not None and sequence.decoding:
                self._make_room(sequence)
        room = self.batched_tokens - sum(_missing(sequence) for sequence in self._running)
        self._admit(room)
        chosen = [(sequence, 1) for sequence in self._running if sequence.decoding]
        room = self.batched_tokens - len(chosen)
        # Nobody waits for a step without answers.
        allowance = None if self.prefill_s is None or not chosen else Allowance(self.costs, self.prefill_s)
        for sequence in self._running:
            if not sequence.decoding and room > 0:
                count = min(_missing(sequence), room)
                if allowance is not None:
                    count = allowance.take(sequence.computed, count)
                if count > 0:
                    chosen.append((sequence, count))
                    room -= count
        if not chosen:
            return None
        return StepPlan(
            Step(tuple(self._row(sequence, count) for sequence, count in chosen)),
            tuple(sequence for sequence, _ in chosen),
        )

    def postprocess(self, plan: StepPlan, sampled: list[int | None]) -> list[TokenSequence]:
        """Note what a step has computed; `sampled` has a token for each row that wanted logits.

        Returns the sequences that took a token, and those whose prompt was all that was to be read; a
        sequence that ended meanwhile takes nothing.
        """
        gained = []
        for sequence, row, token_id in zip(plan.sequences, plan.step.rows, sampled, strict=True):
            if sequence.ended:
                continue
            sequence.computed = row.start + len(row.tokens)
            self._seal(sequence, row.start)
            if row.want is Want.LOGITS and token_id is not None:
                gained.append(sequence)
                if sequence.append(token_id) is not None:
                    self._leave(sequence)
            elif sequence.max_tokens == 0 and sequence.computed == sequence.num_tokens:
                gained.append(sequence)
                sequence.finish_reason = "length" if sequence.scored else "stop"
                self._leave(sequence)
        return gained

    def finish(self, request_id: str, reason: FinishReason) -> TokenSequence | None:
        """End a sequence for a reason outside its tokens; None when it is not there."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = reason
        self._leave(sequence)
        return sequence

    def abort(self, request_id: str) -> TokenSequence | None:
        """End a sequence because nobody wants it any more; None when it is not there."""
        return self.finish(request_id, "abort")

    def hold(self) -> None:
        """Schedule only what has tokens of its answer already; the rest waits for `resume`."""
        self.held = True

    def resume(self) -> None:
        """Schedule everything again; nothing that was computed until now is found any more."""
        self.held = False
        self.pool.forget()

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return a plan."""
        sequences = (*self._running, *self._waiting)
        return any(not self.held or sequence.output_ids for sequence in sequences)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _make_room(self, sequence: TokenSequence) -> None:
        """See that there is a block for the next token: the last in turn gives way, be it this one."""
        if len(sequence.blocks) * self.pool.block_size >= sequence.num_tokens:
            return
        while not self.pool.num_free:
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return
        sequence.blocks.append(self.pool.allocate())

    def _admit(self, room: int) -> None:
        """Let those that wait run, in their order, as far as places, blocks and the step's tokens reach."""
        position = 0
        while position < len(self._waiting) and room > 0:
            sequence = self._waiting[position]
            if self.held and not sequence.output_ids:
                position += 1
                continue
            found = self._find(sequence)
            needed = self.pool.blocks_for(sequence.num_tokens) - len(found)
            while not self._fits(found, needed):
                if not self._running or self._running[-1].priority <= sequence.priority:
                    return
                self._preempt(self._running[-1])
                found = self._find(sequence)
                needed = self.pool.blocks_for(sequence.num_tokens) - len(found)
            self._waiting.remove(sequence)
            self._start(sequence, found, needed)
            room -= _missing(sequence)

    def _fits(self, found: list[int], needed: int) -> bool:
        return bool(self._slots) and needed + self.pool.num_unused(found) <= self.pool.num_free

    def _find(self, sequence: TokenSequence) -> list[int]:
        """The blocks that hold the beginning of a sequence already; its last token is always computed."""
        if sequence.max_tokens == 0 or sequence.scoring:
            return []  # every token's hidden state is wanted
        digests = self._digests[sequence.request_id]
        return self.pool.find(digests.upto(sequence.token_ids, sequence.num_tokens - 1))

    def _start(self, sequence: TokenSequence, found: list[int], needed: int) -> None:
        self.pool.take(found)
        sequence.blocks = [*found, *(self.pool.allocate() for _ in range(needed))]
        sequence.computed = len(found) * self.pool.block_size
        self.found_tokens += sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.computed
        sequence.slot = self._slots.pop()
        self._told[sequence] = 0
        insort(self._running, sequence, key=_turn)

    def _preempt(self, sequence: TokenSequence) -> None:
        self._vacate(sequence)
        self.num_preempted += 1
        insort(self._waiting, sequence, key=_turn)

    def _leave(self, sequence: TokenSequence) -> None:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence)
        del self._by_id[sequence.request_id]
        del self._digests[sequence.request_id]

    def _vacate(self, sequence: TokenSequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self._slots.append(sequence.slot)
        self.pool.release(sequence.blocks)
        del self._told[sequence]
        sequence.slot, sequence.blocks, sequence.computed = None, [], 0

    def _seal(self, sequence: TokenSequence, start: int) -> None:
        """Let others find the blocks that the step has filled."""
        size = self.pool.block_size
        first, last = start // size, sequence.computed // size
        if first == last:
            return
        digests = self._digests[sequence.request_id].upto(sequence.token_ids, sequence.computed)
        for number in range(first, last):
            self.pool.seal(sequence.blocks[number], digests[number])

    def _row(self, sequence: TokenSequence, count: int) -> Row:
        assert sequence.slot is not None
        keep = self._told[sequence]
        self._told[sequence] = len(sequence.blocks)
        end = sequence.computed + count
        if sequence.max_tokens == 0:
            want = Want.NOTHING if sequence.scored else Want.HIDDEN
        else:
            want = Want.LOGITS if end == sequence.num_tokens else Want.NOTHING
        # After the last token of a prompt comes the answer.
        scored = min(count, len(sequence.prompt_ids) - 1 - sequence.computed) if sequence.scoring else 0
        tokens = tuple(sequence.token_ids[sequence.computed : end])
        blocks = tuple(sequence.blocks[keep:])
        return Row(sequence.slot, sequence.computed, tokens, keep, blocks, want, scored)


def _missing(sequence: TokenSequence) -> int:
    """Tokens of a sequence that are still to be computed."""
    return sequence.num_tokens - sequence.computed


def _turn(sequence: TokenSequence) -> tuple[int, int]:
    return sequence.rank
