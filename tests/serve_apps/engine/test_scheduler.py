"""The scheduler alone: what it promises holds for any order of arrivals, steps and departures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.engine.protocol import QueueFullError
from serve_apps.engine.torch_engine.scheduler import Scheduler
from serve_apps.engine.torch_engine.sequence import Sequence
from serve_apps.engine.torch_engine.step import Kind, Move, Step, decode, encode, frame_size

EOS = 0


class Device:
    """What a model with a cache would hold after the same steps: the tokens of each row, by position."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def run(self, step: Step) -> list[list[int]]:
        """Apply the step; every token that each of its rows has seen then."""
        for move in step.moves:
            self.rows[move.target] = self.rows[move.source][: move.length]
        seen = []
        for row, (tokens, start) in enumerate(zip(step.tokens, step.starts, strict=True), step.first_row):
            self.rows[row] = [*self.rows.get(row, [])[:start], *tokens]
            assert len(self.rows[row]) == start + len(tokens), "a position was left out"
            seen.append(list(self.rows[row]))
        return seen


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, serve_apps.engine.torch_engine.scheduler, serve_apps.engine.torch_engine.detokenize;"
        "sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("abort while it runs"), st.integers(0, 30), st.just(0)),
    ),
    max_size=60,
)


@given(actions, st.integers(1, 4), st.integers(0, 5), st.integers(1, 20))
def test_every_row_sees_exactly_its_own_tokens_whoever_comes_and_goes(
    actions: list[tuple[str, int, int]], max_batch: int, max_waiting: int, prefill_tokens: int
) -> None:
    scheduler = Scheduler(max_batch, max_waiting, prefill_tokens)
    device = Device()
    sequences: list[Sequence] = []
    started: list[Sequence] = []
    next_token = 100

    def step(abort: int | None = None, end: int = 1) -> bool:
        nonlocal next_token
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work
            return False
        rows = range(plan.step.first_row, plan.step.first_row + len(plan.sequences))
        assert rows.stop <= max_batch
        assert [sequence.row for sequence in plan.sequences] == list(rows)
        alive = sorted(s.row for s in sequences if s.row is not None and not s.ended)
        assert alive == list(range(len(alive))), "rows must be contiguous"
        if plan.step.is_prefill:
            started.extend(plan.sequences)
            longest = max(len(tokens) for tokens in plan.step.tokens)
            assert len(rows) == 1 or longest * len(rows) <= prefill_tokens
        else:
            assert rows == range(len(alive)), "all that run decode together"
        for sequence, seen in zip(plan.sequences, device.run(plan.step), strict=True):
            assert seen == [*sequence.prompt_ids, *sequence.output_ids]
        if abort is not None and sequences:
            scheduler.abort(sequences[abort % len(sequences)].request_id)
        ended = {sequence for sequence in plan.sequences if sequence.ended}
        sampled = [EOS if end == 0 and row == rows.start else next_token + row for row in rows]
        gained = scheduler.postprocess(plan, sampled)
        assert set(gained) == set(plan.sequences) - ended
        next_token += max_batch
        return True

    for action, number, max_tokens in actions:
        if action == "add":
            free = max_batch - scheduler.num_running
            prompt = tuple(range(1000 * len(sequences), 1000 * len(sequences) + number))
            sequence = Sequence(str(len(sequences)), prompt, max_tokens, frozenset({EOS}))
            if scheduler.num_waiting >= max_waiting + free:
                with pytest.raises(QueueFullError):
                    scheduler.add(sequence)
            else:
                scheduler.add(sequence)
                sequences.append(sequence)
        elif action == "step":
            step(end=number)
        elif action == "abort while it runs":
            step(abort=number)
        elif sequences:
            scheduler.abort(sequences[number % len(sequences)].request_id)
        assert scheduler.num_running <= max_batch
    # Nobody starves: with no more arrivals everything ends within the work that there is.
    for _ in range(sum(sequence.max_tokens + 1 for sequence in sequences)):
        if not step():
            break
    assert all(sequence.ended for sequence in sequences)
    for sequence in sequences:
        if sequence.finish_reason == "length":
            assert len(sequence.output_ids) == sequence.max_tokens
        elif sequence.finish_reason == "stop":
            assert sequence.output_ids.index(EOS) == len(sequence.output_ids) - 1
    assert [int(s.request_id) for s in started] == sorted(int(s.request_id) for s in started), (
        "first come first"
    )
    assert scheduler.num_running == scheduler.num_waiting == scheduler.cached_tokens == 0


def test_running_sequences_go_on_while_new_ones_keep_coming() -> None:
    scheduler = Scheduler(max_batch=3, max_waiting=100, prefill_tokens=4)
    first = Sequence("first", (1, 2), max_tokens=5)
    scheduler.add(first)
    steps = 0
    while not first.ended:
        scheduler.add(Sequence(f"other {steps}", (1, 2), max_tokens=50))
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.postprocess(plan, [7] * len(plan.sequences))
        steps += 1
    assert steps <= 3 + 5


def test_the_last_row_moves_into_the_hole() -> None:
    scheduler = Scheduler(max_batch=4, max_waiting=4, prefill_tokens=100)
    for name in "abcd":
        scheduler.add(Sequence(name, (1, 2, 3), max_tokens=9))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.postprocess(plan, [5] * 4)
    scheduler.abort("b")
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.step.moves == (Move(source=3, target=1, length=3),)
    assert [sequence.request_id for sequence in plan.sequences] == ["a", "d", "c"]


def test_an_id_can_be_used_again_only_when_it_is_free() -> None:
    scheduler = Scheduler(max_batch=1, max_waiting=4, prefill_tokens=100)
    scheduler.add(Sequence("a", (1,), max_tokens=9))
    with pytest.raises(ValueError, match="already"):
        scheduler.add(Sequence("a", (1,), max_tokens=9))
    scheduler.abort("a")
    scheduler.add(Sequence("a", (1,), max_tokens=9))


ints = st.integers(0, 2**31)
prefills = st.lists(st.lists(ints, min_size=1, max_size=9), min_size=1, max_size=8)
moves = st.lists(st.builds(Move, ints, ints, ints), max_size=8)


@given(moves, prefills, st.integers(0, 8))
def test_a_step_survives_the_wire(moves: list[Move], prompts: list[list[int]], first_row: int) -> None:
    step = Step(tuple(moves), first_row, tuple(map(tuple, prompts)), (0,) * len(prompts))
    assert decode([*encode(Kind.STEP, step), 9, 9, 9]) == (Kind.STEP, step)


def test_a_decode_step_fits_its_frame_and_other_messages_too() -> None:
    full = Step(tuple(Move(1, 2, 3) for _ in range(8)), 0, ((1,),) * 8, (5,) * 8)
    assert len(encode(Kind.STEP, full)) <= frame_size(8)
    for kind in (Kind.IDLE, Kind.STOP):
        assert len(encode(kind)) <= frame_size(1)
        assert decode(encode(kind)) == (kind, None)
