"""What a guard finds in losses, and what a way back leaves out."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.sections.train import RecoveryConfig
from train_jobs.data.order import batch_of_step
from train_jobs.errors import LossError
from train_jobs.optimization.loss_guard import BadStep, LossGuard, spike_limit

finite = st.floats(-1e6, 1e6)


def guard(non_finite: str = "stop", **spike: Any) -> LossGuard:
    return LossGuard(
        RecoveryConfig.model_validate(
            {"non_finite_loss": non_finite, "loss_spike": spike, "skips_in_a_row": 3, "go_backs": 4}
        )
    )


def policy(bad: BadStep | None) -> str | None:
    return None if bad is None else bad.policy


@pytest.mark.parametrize("wanted", ["stop", "skip", "go_back"])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_always_found(wanted: str, loss: float) -> None:
    found = guard(wanted).look(loss)
    assert found == BadStep(wanted, f"the loss is {loss}")  # type: ignore[arg-type]
    assert guard(wanted).look_at_norm(loss).policy == wanted


@given(st.lists(finite, max_size=100), finite)
def test_finite_losses_are_never_judged_unless_spikes_are_looked_for(
    losses: list[float], loss: float
) -> None:
    watching = guard("skip")
    for each in losses:
        watching.took(each)
    assert watching.look(loss) is None


@given(st.lists(finite, min_size=1, max_size=60), st.floats(0.5, 20))
def test_the_limit_is_the_median_and_so_many_robust_deviations(losses: list[float], threshold: float) -> None:
    middle = float(np.median(losses))
    spread = max(1.4826 * float(np.median(np.abs(np.asarray(losses) - middle))), 0.01 * abs(middle))
    assert spike_limit(losses, threshold) == pytest.approx(middle + threshold * spread, rel=1e-9, abs=1e-9)


@given(st.integers(0, 2**32), st.floats(0, 3), st.floats(0.5, 8))
@settings(max_examples=30, deadline=None)
def test_noise_makes_no_spike_and_a_jump_of_ten_deviations_does(seed: int, fall: float, level: float) -> None:
    """Losses that fall, as those of a job do, with normal noise of a twentieth of their level."""
    chance, watching = np.random.default_rng(seed), guard(policy="skip")
    noise = level / 20
    for step in range(300):
        loss = level + fall * math.exp(-step / 60) + noise * float(np.clip(chance.standard_normal(), -3, 3))
        assert watching.look(loss) is None
        watching.took(loss)
    bad = watching.look(level + fall * math.exp(-5) + 13 * noise)
    assert bad is not None
    assert bad.policy == "skip"


def test_no_loss_is_judged_before_the_window_is_full() -> None:
    watching = guard(policy="go_back", window_steps=8)
    for _ in range(7):
        watching.took(1.0)
        assert watching.look(100.0) is None
    watching.took(1.0)
    assert policy(watching.look(100.0)) == "go_back"
    assert watching.look(0.001) is None, "falling is no spike"


def test_a_warning_is_given_once_until_the_losses_are_as_before() -> None:
    watching = guard(policy="warn", window_steps=8)
    said = []
    for step, loss in enumerate([1.0] * 20 + [5.0] * 2 + [1.0] * 3 + [5.0] + [1.0] * 3):
        if watching.look(loss) is not None:
            said.append(step)
        watching.took(loss)
    assert said == [20, 25]


def test_losses_that_stay_higher_become_what_is_usual() -> None:
    watching = guard(policy="warn", window_steps=8)
    for loss in [1.0] * 8 + [2.0] * 8:
        watching.took(loss)
    assert watching.look(2.0) is None
    assert policy(watching.look(3.0)) == "warn"


def test_only_so_many_steps_in_a_row_are_skipped() -> None:
    watching = guard("skip")
    bad = BadStep("skip", "the loss is nan")
    for step in range(3):
        watching.skip(bad, step)
    watching.took(1.0)
    for step in range(4, 7):
        watching.skip(bad, step)
    with pytest.raises(LossError, match="the loss is nan in step 8, after 3 skipped steps in a row"):
        watching.skip(bad, 7)


@given(st.sets(st.integers(0, 40)), st.integers(0, 60))
def test_steps_take_the_batches_that_are_left_in_order(passed_over: set[int], step: int) -> None:
    left = [batch for batch in range(200) if batch not in passed_over]
    assert batch_of_step(step, sorted(passed_over)) == left[step]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=4))
def test_a_batch_that_was_gone_back_from_is_never_taken_again(history: list[tuple[int, int]]) -> None:
    """So many good steps and a bad one, over and over; a checkpoint is saved every so many steps."""
    watching, bad = guard("go_back"), BadStep("go_back", "the loss is nan")
    step, blamed = 0, set()
    saved = {0: json.dumps(watching.state())}
    for good_steps, every in history:
        for _ in range(good_steps):
            assert watching.batch(step) not in blamed
            watching.took(1.0)
            step += 1
            if step % every == 0:
                saved[step] = json.dumps(watching.state())
        blamed.add(watching.batch(step))
        watching.go_back(bad, step)
        way = watching.returning
        assert way is not None
        to = [each for each in sorted(saved) if each <= step and (way.before is None or each < way.before)]
        if not to:
            return  # the job ends here: there is nothing to go back to
        step = to[-1]
        saved = {each: text for each, text in saved.items() if each <= step}
        watching.load(json.loads(saved[step]))
        watching.returned(way)
        assert watching.returning is None
        assert blamed <= set(watching.passed_over)
        assert watching.batches(step) == (watching.batch(step - 1) + 1 if step else 0)
    assert watching.went_back == len(history)


def test_a_checkpoint_that_is_bad_itself_is_not_gone_back_to_twice() -> None:
    watching, bad = guard("go_back"), BadStep("go_back", "the loss is nan")
    watching.go_back(bad, 25)
    assert watching.returning is not None
    assert (watching.returning.passed_over, watching.returning.before) == ((25,), None)
    watching.returned(watching.returning)
    watching.go_back(bad, 20)  # where it came back to, without a step done
    way = watching.returning
    assert (way.passed_over, way.before) == ((19, 20, 25), 20)
    watching.returned(way)
    watching.took(1.0)
    watching.go_back(bad, 11)
    assert watching.returning.before is None


def test_a_job_goes_back_only_so_often() -> None:
    watching, bad = guard("go_back"), BadStep("go_back", "the loss is inf")
    for step in range(10, 14):
        watching.go_back(bad, step)
        assert watching.returning is not None
        watching.returned(watching.returning)
        watching.took(1.0)
    with pytest.raises(LossError, match="the loss is inf in step 21, and the job went back 4 times already"):
        watching.go_back(bad, 20)


@given(st.lists(finite, max_size=40), st.booleans())
def test_a_guard_goes_on_from_what_another_left(losses: list[float], went_back: bool) -> None:
    one, other = (guard("go_back", policy="warn", window_steps=8) for _ in range(2))
    for loss in losses:
        one.took(loss)
    if went_back:
        one.go_back(BadStep("go_back", "the loss is nan"), 7)
        assert one.returning is not None
        one.returned(one.returning)
    other.load(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    assert (other.went_back, other.batch(9)) == (one.went_back, one.batch(9))
    for loss in (1.0, 1e7, 1e7, -1e7):
        assert other.look(loss) == one.look(loss)
        one.took(loss)
        other.took(loss)


def test_a_state_of_before_there_were_guards_begins_anew() -> None:
    watching = guard("go_back", policy="skip")
    watching.took(1.0)
    watching.load(None)
    assert watching.state() == guard().state()
