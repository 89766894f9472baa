"""How much of prompts a step reads beside running answers: held against machines whose speed is known."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_apps.engine.torch_engine.block_pool import BlockPool
from serve_apps.engine.torch_engine.pace import LEAST_TOKENS, Allowance, StepCosts, StepWork, pairs_of
from serve_apps.engine.torch_engine.scheduler import Scheduler
from serve_apps.engine.torch_engine.sequence import TokenSequence
from serve_apps.engine.torch_engine.step import Row, Step, Want

PREFILL_S = 0.05


def test_needs_no_torch() -> None:
    code = "import sys, serve_apps.engine.torch_engine.pace; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0


@dataclass(frozen=True)
class Machine:
    """What its steps take: seconds for each thing that a step does."""

    always: float = 2e-3
    answer: float = 5e-4
    answer_seen: float = 1e-7
    token: float = 1e-4
    before: float = 5e-7
    pair: float = 5e-8

    def seconds(self, work: StepWork) -> float:
        answers = self.answer * work.answers + self.answer_seen * work.answers_seen
        return self.always + answers + self.prompts(work)

    def prompts(self, work: StepWork) -> float:
        return self.token * work.tokens + self.before * work.before + self.pair * work.pairs

    def least(self, work: StepWork) -> float:
        """What the fewest tokens that a step reads take at that place of the prompt."""
        return self.prompts(replace(work, tokens=LEAST_TOKENS, pairs=pairs_of(work.before, LEAST_TOKENS)))


def read(
    machine: Machine, costs: StepCosts, length: int, *, chance: random.Random | None = None, answers: int = 3
) -> list[StepWork]:
    """Read a prompt beside answers; the steps that it took."""
    works, at = [], 0
    while at < length:
        new = Allowance(costs, PREFILL_S).take(at, length - at)
        assert 0 < new <= length - at, "the prompt goes on with every step"
        assert new >= min(LEAST_TOKENS, length - at)
        work = StepWork(answers, answers * (100 + len(works)), new, at, pairs_of(at, new))
        noise = 1.0 if chance is None else chance.uniform(0.8, 1.25)
        costs.observe(work, noise * machine.seconds(work))
        works.append(work)
        at += new
    return works


def answer(machine: Machine, costs: StepCosts, steps: int, answers: int = 3) -> None:
    """Steps without prompts."""
    for number in range(steps):
        work = StepWork(answers, answers * (20 + number))
        costs.observe(work, machine.seconds(work))


def logs(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(0, 1).map(lambda part: low * (high / low) ** part)


machines = st.builds(
    Machine,
    always=logs(1e-4, 2e-2),
    answer=logs(1e-5, 1e-2),
    answer_seen=logs(1e-9, 1e-6),
    token=logs(1e-6, 2e-3),
    before=st.one_of(st.just(0.0), logs(1e-9, 2e-6)),
    pair=logs(1e-10, 2e-7),
)


@settings(max_examples=40, deadline=None)
@given(machine=machines, seed=st.integers(0, 1000), length=st.integers(1, 10_000), noisy=st.booleans())
def test_pieces_take_the_time_that_they_may_on_any_machine(
    machine: Machine, seed: int, length: int, noisy: bool
) -> None:
    costs = StepCosts()
    answer(machine, costs, 5)
    works = read(machine, costs, length, chance=random.Random(seed) if noisy else None)
    # While little is known, pieces grow from the least by doubling: a machine is never taken by surprise.
    most = [max(PREFILL_S, machine.least(work)) for work in works]
    over = [machine.prompts(work) / may for work, may in zip(works, most, strict=True)]
    assert max(over) < 4
    late = sorted(over[20:])
    if late:
        assert late[len(late) // 2] < 1.3
        assert late[int(0.95 * (len(late) - 1))] < 2


@settings(max_examples=20, deadline=None)
@given(machine=machines)
def test_the_time_that_there_is_is_used(machine: Machine) -> None:
    """Pieces that are too small would be no flow of answers, only a prompt that is read late."""
    costs = StepCosts()
    answer(machine, costs, 5)
    works = read(machine, costs, 10_000)
    late = sorted(machine.prompts(work) / PREFILL_S for work in works[20:-1])
    if late:
        assert late[len(late) // 2] > 0.45


@pytest.mark.parametrize("slow_s", [0.5, 10.0, 300.0])
def test_a_first_step_that_is_far_too_slow_holds_nothing_up(slow_s: float) -> None:
    machine = Machine()
    costs = StepCosts()
    costs.observe(StepWork(0, 0, 64, 0, pairs_of(0, 64)), slow_s)
    answer(machine, costs, 5)
    works = read(machine, costs, 8000)
    expected = read(machine, StepCosts(), 8000)
    assert len(works) <= 1.2 * len(expected) + 5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), times=st.floats(3, 1000))
def test_a_step_held_up_by_something_else_changes_little(seed: int, times: float) -> None:
    machine, chance = Machine(), random.Random(seed)
    costs = StepCosts()
    answer(machine, costs, 5)
    read(machine, costs, 6000, chance=chance)
    before = Allowance(costs, PREFILL_S).take(4000, 10_000)
    work = StepWork(3, 300, before, 4000, pairs_of(4000, before))
    costs.observe(work, times * machine.seconds(work))
    after = Allowance(costs, PREFILL_S).take(4000, 10_000)
    assert 0.8 * before <= after <= 1.25 * before


def test_a_machine_that_becomes_slower_is_believed() -> None:
    machine = Machine()
    slower = Machine(*(3 * price for price in vars(machine).values()))
    costs = StepCosts()
    answer(machine, costs, 5)
    read(machine, costs, 8000)
    answer(slower, costs, 20)
    works = read(slower, costs, 20_000)
    late = works[len(works) // 2 :]
    assert all(slower.prompts(work) < 1.5 * max(PREFILL_S, slower.least(work)) for work in late)


def test_many_steps_without_prompts_make_nothing_forgotten() -> None:
    machine = Machine()
    costs = StepCosts()
    answer(machine, costs, 5)
    read(machine, costs, 8000)
    before = Allowance(costs, PREFILL_S).take(0, 10_000)
    answer(machine, costs, 100_000)
    work = StepWork(3, 300, LEAST_TOKENS, 0, pairs_of(0, LEAST_TOKENS))
    costs.observe(work, machine.seconds(work))
    assert Allowance(costs, PREFILL_S).take(0, 10_000) == pytest.approx(before, rel=0.2)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 30_000)), min_size=1, max_size=8),
    machine=machines,
)
@settings(deadline=None)
def test_several_prompts_share_one_steps_time(prompts: list[tuple[int, int]], machine: Machine) -> None:
    costs = StepCosts()
    answer(machine, costs, 5)
    read(machine, costs, 3000)
    allowance = Allowance(costs, PREFILL_S)
    taken = [(start, allowance.take(start, most)) for start, most in prompts]
    assert taken[0][1] >= min(prompts[0][1], LEAST_TOKENS), "the first always goes on"
    price, before, pair = costs.prompt_prices()
    spent = [price * new + before * start + pair * pairs_of(start, new) for start, new in taken if new]
    assert sum(spent[1:]) <= max(0.0, PREFILL_S - spent[0]) + 1e-9
    assert all(new == 0 or new <= most for (_, new), (_, most) in zip(taken, prompts, strict=True))


def test_work_counts_what_a_step_does() -> None:
    rows = (
        Row(0, 9, (1,), 0, ()),
        Row(1, 19, (1,), 0, ()),
        Row(2, 100, (1, 2, 3), 0, (), Want.NOTHING),
        Row(3, 0, (1, 2), 0, ()),
    )
    assert StepWork.of(Step(rows)) == StepWork(
        answers=2, answers_seen=10 + 20, tokens=5, before=100, pairs=101 + 102 + 103 + 1 + 2
    )


def simulate(machine: Machine, prefill_s: float | None, length: int) -> tuple[list[float], float]:
    """The gaps of a stream beside a prompt, and when that has its first token, by the scheduler's plans."""
    costs = StepCosts()
    scheduler = Scheduler(BlockPool(4000, 32), 8, 8, 2048, prefill_s, costs)
    scheduler.add(TokenSequence("stream", tuple(range(1, 65)), max_tokens=100_000))
    prompt = TokenSequence("prompt", tuple(range(1, length + 1)), max_tokens=1)
    gaps, took = [], 0.0
    for number in range(100_000):
        if number == 10:
            scheduler.add(prompt)
        plan = scheduler.schedule()
        assert plan is not None
        seconds = machine.seconds(StepWork.of(plan.step))
        costs.observe(StepWork.of(plan.step), seconds)
        scheduler.postprocess(plan, [5 if row.want is Want.LOGITS else None for row in plan.step.rows])
        if number > 10:
            gaps.append(seconds)
            took += seconds
        if prompt.ended:
            return gaps, took
    raise AssertionError("the prompt was never read")


def test_a_stream_keeps_its_flow_beside_a_long_prompt() -> None:
    machine = Machine(token=1e-4, before=5e-7, pair=4e-8)
    gaps, _ = simulate(machine, PREFILL_S, 30_000)
    ordered = sorted(gaps)
    assert ordered[len(ordered) // 2] < 1.2 * PREFILL_S + 5e-3
    assert ordered[-1] < 3 * PREFILL_S
    unbounded, alone = simulate(machine, None, 30_000)
    assert max(unbounded) > 1.0, "without a bound the same machine stalls"
    _, bounded = simulate(machine, PREFILL_S, 30_000)
    assert bounded < 3 * alone


def test_where_nobody_answers_pieces_are_as_large_as_they_may_be() -> None:
    scheduler = Scheduler(BlockPool(4000, 32), 8, 8, 2048, 1e-9)
    scheduler.add(TokenSequence("prompt", tuple(range(1, 5001)), max_tokens=1))
    sizes = []
    while (plan := scheduler.schedule()) is not None:
        sizes.append(len(plan.step.rows[0].tokens))
        scheduler.postprocess(plan, [5 if row.want is Want.LOGITS else None for row in plan.step.rows])
    assert sizes == [2048, 2048, 904]
