"""The scheduler alone: what it promises holds for any order of arrivals, steps and departures."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_apps.engine.protocol import QueueFullError
from serve_apps.engine.torch_engine.block_pool import BlockPool
from serve_apps.engine.torch_engine.scheduler import Scheduler, StepPlan
from serve_apps.engine.torch_engine.sequence import TokenSequence
from serve_apps.engine.torch_engine.step import Kind, Row, Step, Want, decode, encode, frame_size

EOS = 0
LONGEST = 12
"""Most tokens of a sequence in these tests."""


def next_token(tokens: list[int]) -> int:
    """What the "model" says after these tokens: any function of all of them, now and then the end."""
    return (len(tokens) * 7 + sum(index * token for index, token in enumerate(tokens, 1))) % 11


def answer_of(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class Device:
    """The ranks' side: what lies in each place of the cache, as the tokens that led to it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, plan: StepPlan) -> list[int | None]:
        """The tokens that follow the rows that want one; every row must find exactly its own tokens."""
        step = decode([*encode(Kind.STEP, plan.step), 9, 9])[1]
        assert step == plan.step
        for row, sequence in zip(plan.step.rows, plan.sequences, strict=True):
            table = self.tables.setdefault(row.slot, [])
            del table[row.keep :]
            table.extend(row.blocks)
            for at in range(row.start, row.start + len(row.tokens)):
                assert row.tokens[at - row.start] == sequence.token_ids[at]
                self.places[self._place(table, at)] = tuple(sequence.token_ids[: at + 1])
        sampled: list[int | None] = []
        for row, sequence in zip(plan.step.rows, plan.sequences, strict=True):
            table = self.tables[row.slot]
            end = row.start + len(row.tokens)
            for at in range(end):
                assert self.places[self._place(table, at)] == tuple(sequence.token_ids[: at + 1])
            wants = row.want is Want.LOGITS
            assert wants == (end == sequence.num_tokens and sequence.max_tokens > 0)
            sampled.append(next_token(sequence.token_ids) if wants else None)
        return sampled

    def _place(self, table: list[int], at: int) -> tuple[int, int]:
        return table[at // self.block_size], at % self.block_size


def check_blocks(scheduler: Scheduler, alive: list[TokenSequence]) -> None:
    """Every block in use is used by exactly those that hold it, and nothing is lost."""
    pool = scheduler.pool
    users = Counter(block for sequence in alive for block in sequence.blocks)
    assert pool.num_used == len(users)
    assert pool.num_free == pool.num_blocks - len(users)
    slots = [sequence.slot for sequence in alive if sequence.slot is not None]
    assert len(set(slots)) == len(slots) == scheduler.num_running <= scheduler.max_batch
    assert all(0 <= slot < scheduler.max_batch for slot in slots)


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, serve_apps.engine.torch_engine.scheduler, serve_apps.engine.detokenize;"
        "sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0


# Prompts of few different tokens, so that many begin alike, and long ones as often as short ones.
prompts = st.integers(1, LONGEST - 4).flatmap(
    lambda length: st.lists(st.sampled_from([1, 1, 1, 2]), min_size=length, max_size=length)
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(0, 4), st.integers(0, 1)),
        st.tuples(st.just("add"), prompts, st.integers(1, 4), st.just(0)),
        st.tuples(st.just("step"), st.just([]), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.just([]), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.just([]), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("abort while it runs"), st.just([]), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("change the model"), st.just([]), st.just(0), st.just(0)),
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(
    actions=actions,
    max_batch=st.integers(1, 4),
    max_waiting=st.integers(0, 5),
    batched_tokens=st.integers(1, 16),
    block_size=st.integers(1, 4),
    spare_blocks=st.integers(0, 8),
    caching=st.booleans(),
)
def test_every_answer_is_its_own_whoever_comes_and_goes(
    actions: list[tuple[str, list[int], int, int]],
    max_batch: int,
    max_waiting: int,
    batched_tokens: int,
    block_size: int,
    spare_blocks: int,
    caching: bool,
) -> None:
    # As little room as one sequence needs, or a little more: sequences give way all the time.
    pool = BlockPool(-(-LONGEST // block_size) + spare_blocks, block_size, caching)
    scheduler = Scheduler(pool, max_batch, max_waiting, batched_tokens)
    device = Device(block_size)
    sequences: list[TokenSequence] = []

    def alive() -> list[TokenSequence]:
        return [sequence for sequence in sequences if not sequence.ended]

    def step(abort: int | None = None, hold: bool = False) -> bool:
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work
            return False
        check_blocks(scheduler, alive())
        counts = [len(row.tokens) for row in plan.step.rows]
        decoding = [s for s in alive() if s.slot is not None and s.decoding]
        assert set(decoding) <= set(plan.sequences), "no answer stands still"
        assert all(counts)
        assert sum(counts) <= max(batched_tokens, len(decoding))
        sampled = device.run(plan)
        if abort is not None and sequences:
            scheduler.abort(sequences[abort % len(sequences)].request_id)
        if hold:
            scheduler.hold()
        ended = {sequence for sequence in plan.sequences if sequence.ended}
        if not caching:
            assert scheduler.found_tokens == 0
        gained = scheduler.postprocess(plan, sampled)
        assert not ended & set(gained)
        check_blocks(scheduler, alive())
        return True

    for action, prompt, number, priority in actions:
        if action == "add":
            free = max_batch - scheduler.num_running
            sequence = TokenSequence(str(len(sequences)), prompt, number, frozenset({EOS}), priority)
            if scheduler.num_waiting >= max_waiting + free:
                with pytest.raises(QueueFullError):
                    scheduler.add(sequence)
            else:
                scheduler.add(sequence)
                sequences.append(sequence)
        elif action == "step":
            step()
        elif action == "abort while it runs":
            step(abort=number)
        elif action == "abort" and sequences:
            scheduler.abort(sequences[number % len(sequences)].request_id)
        elif action == "change the model":
            step(hold=True)
            scheduler.hold()
            begun = [sequence for sequence in alive() if sequence.output_ids]
            while step():
                pass
            assert all(sequence.ended for sequence in begun)
            assert all(not s.output_ids and s.slot is None for s in alive()), "nothing new has begun"
            device.places.clear()
            scheduler.resume()
    # Nobody starves: with no more arrivals everything ends within the work that there is.
    for _ in range(20 * LONGEST * (len(sequences) + 1)):
        if not step():
            break
    assert all(sequence.ended for sequence in sequences)
    for sequence in sequences:
        expected = answer_of(list(sequence.prompt_ids), sequence.max_tokens)
        if sequence.finish_reason == "abort":
            assert sequence.output_ids == expected[: len(sequence.output_ids)]
        else:
            assert sequence.output_ids == expected
    assert scheduler.num_running == scheduler.num_waiting == pool.num_used == 0


def make(num_blocks: int = 100, block_size: int = 4, **options: int) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, **({"max_batch": 4, "max_waiting": 100, "batched_tokens": 100} | options))


def run(scheduler: Scheduler, device: Device | None = None) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    sampled = device.run(plan) if device else [5 if r.want is Want.LOGITS else None for r in plan.step.rows]
    scheduler.postprocess(plan, sampled)
    return plan


def names(plan: StepPlan) -> list[str]:
    return [sequence.request_id for sequence in plan.sequences]


def test_a_long_prompt_is_read_beside_the_answers_of_the_others() -> None:
    scheduler = make(batched_tokens=10)
    scheduler.add(TokenSequence("answers", (1, 2), max_tokens=50))
    run(scheduler)
    scheduler.add(TokenSequence("long", tuple(range(1, 31)), max_tokens=5))
    counts = []
    for _ in range(4):
        plan = run(scheduler)
        assert names(plan) == ["answers", "long"]
        counts.append(tuple(len(row.tokens) for row in plan.step.rows))
    assert counts == [(1, 9), (1, 9), (1, 9), (1, 3)]
    assert [len(row.tokens) for row in run(scheduler).step.rows] == [1, 1]


def test_the_order_is_by_priority_and_then_by_arrival() -> None:
    scheduler = make(max_batch=1)
    for name, priority in (("c", 1), ("a", -1), ("d", 1), ("b", 0)):
        scheduler.add(TokenSequence(name, (1, 2), max_tokens=1, priority=priority))
    assert [names(run(scheduler))[0] for _ in range(4)] == ["a", "b", "c", "d"]


def test_a_request_that_matters_more_takes_the_place_of_one_that_matters_less() -> None:
    scheduler = make(max_batch=2)
    device = Device(4)
    ordinary = [TokenSequence(name, (1, 2, 3), max_tokens=4, priority=1) for name in "ab"]
    for sequence in ordinary:
        scheduler.add(sequence)
    run(scheduler, device)
    scheduler.add(TokenSequence("urgent", (2,), max_tokens=2, priority=0))
    plan = run(scheduler, device)
    assert set(names(plan)) == {"a", "urgent"}
    assert scheduler.num_preempted == 1
    # One of the same priority waits.
    scheduler.add(TokenSequence("late", (2,), max_tokens=2, priority=1))
    assert "late" not in names(run(scheduler, device))
    while scheduler.has_work:
        run(scheduler, device)
    for sequence in ordinary:
        assert sequence.output_ids == answer_of([1, 2, 3], 4)


def test_where_no_block_is_left_the_last_gives_way() -> None:
    scheduler = make(num_blocks=4, block_size=2)
    for name in "ab":
        scheduler.add(TokenSequence(name, (ord(name), 2, 3), max_tokens=5))
    assert names(run(scheduler)) == ["a", "b"]
    assert names(run(scheduler)) == ["a", "b"]
    assert names(run(scheduler)) == ["a"]
    assert (scheduler.num_preempted, scheduler.num_waiting) == (1, 1)


def test_an_equal_beginning_is_computed_once() -> None:
    scheduler = make(block_size=4)
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    scheduler.add(TokenSequence("first", prompt, max_tokens=9))
    run(scheduler)
    scheduler.add(TokenSequence("same", prompt, max_tokens=9))
    scheduler.add(TokenSequence("longer", (*prompt, 9, 9), max_tokens=9))
    scheduler.add(TokenSequence("other", (1, 2, 3, 9, 5, 6, 7, 8), max_tokens=9))
    rows = dict(zip(names(plan := run(scheduler)), plan.step.rows, strict=True))
    # The last token of a prompt is always computed: it gives the first of the answer.
    assert (rows["same"].start, rows["longer"].start, rows["other"].start) == (4, 8, 0)
    assert rows["longer"].blocks[:2] == (0, 1)
    assert scheduler.found_tokens == 12


def test_an_id_can_be_used_again_only_when_it_is_free() -> None:
    scheduler = make(max_batch=1)
    scheduler.add(TokenSequence("a", (1,), max_tokens=9))
    with pytest.raises(ValueError, match="already"):
        scheduler.add(TokenSequence("a", (1,), max_tokens=9))
    scheduler.abort("a")
    scheduler.add(TokenSequence("a", (1,), max_tokens=9))


def test_what_lay_unused_longest_is_given_away_first() -> None:
    pool = BlockPool(3, 1)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.seal(block, bytes([block]))
    for block in (1, 0, 2):
        pool.release([block])
    assert pool.find([b"\x01"]) == [1]
    pool.take([1])
    assert [pool.allocate(), pool.allocate()] == [0, 2]
    with pytest.raises(LookupError):
        pool.allocate()
    assert pool.find([b"\x00"]) == []


ints = st.integers(0, 2**31)
tuples = st.lists(ints, max_size=9).map(tuple)
rows = st.builds(Row, ints, ints, tuples, ints, tuples, st.sampled_from(Want))


@given(st.lists(rows, max_size=8))
def test_a_step_survives_the_wire(rows: list[Row]) -> None:
    step = Step(tuple(rows))
    assert decode([*encode(Kind.STEP, step), 9, 9, 9]) == (Kind.STEP, step, "")


@given(st.text())
def test_a_directory_survives_the_wire(text: str) -> None:
    assert decode([*encode(Kind.LOAD, text=text), 9]) == (Kind.LOAD, None, text)


def test_a_decode_step_fits_its_frame_and_other_messages_too() -> None:
    full = Step(tuple(Row(slot, 31, (1,), 1, (7,)) for slot in range(8)))
    assert len(encode(Kind.STEP, full)) <= frame_size(8)
    for kind in (Kind.IDLE, Kind.STOP):
        assert len(encode(kind)) <= frame_size(1)
        assert decode(encode(kind)) == (kind, None, "")
