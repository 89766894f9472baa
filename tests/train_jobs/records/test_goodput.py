"""Where a job's time went: stories whose truth is known, told by the logs that a run of them would have."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train_jobs.records.goodput import Goodput, goodput_of

BEGAN_S = 1_800_000_000.0


class Story:
    """A run as it happens: every second goes into the truth, and what a run would log into the logs."""

    def __init__(self, *, timed: bool = True, tokenizes_s: float = 0.0) -> None:
        self.timed = timed
        self.now_s = 0.0
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.truth: Counter[str] = Counter()
        self.done = self.saved = self.attempt = 0
        self._took: dict[int, float] = {}
        self.submit(tokenizes_s)

    def passes(self, seconds: float, what: str) -> None:
        self.now_s += seconds
        self.truth[what] += seconds  # type: ignore[assignment]

    def says(self, kind: str, **facts: Any) -> None:
        self.events.append({"time": self._time(), "kind": kind, **facts})

    def _time(self) -> str:
        return datetime.fromtimestamp(BEGAN_S + self.now_s, UTC).isoformat()

    def tokenizes(self, seconds: float) -> None:
        """On the workers of a lease, until the grant is another one; so twice."""
        for share in (0.25, 0.75):
            self.says("waiting", min=1, max=1)
            self.passes(2, "waiting" if share > 0.5 else "queued")
            self.says("leased", workers=1, nodes=["n"])
            self.passes(0.1, "starting")
            self.says("preparing", workers=1)
            self.passes(seconds * share, "preparing")

    def submit(self, tokenizes_s: float = 0.0) -> None:
        self.says("submitted", name="lm", steps=100)
        self.passes(4, "queued" if not self.attempt else "starting")
        self.says("preparing")
        self.passes(3, "queued" if not self.attempt else "starting")
        if tokenizes_s:
            self.tokenizes(tokenizes_s)
        leased = self.attempt or tokenizes_s
        self.lease(2, 10, "starting", "waiting" if leased else "queued")

    def lease(self, wait_s: float, start_s: float, cause: str, waits: str = "waiting") -> None:
        self.says("waiting", min=1, max=1)
        self.passes(wait_s / 2, waits)
        self.says("waiting", min=1, max=1, reason="somebody has them")
        self.passes(wait_s / 2, waits)
        self.says("leased", workers=1, nodes=["n"])
        self.passes(start_s, cause)
        self.attempt += 1
        self.says("started", attempt=self.attempt, world_size=1, step=self.done)

    def steps(self, count: int, step_s: float = 0.5, gap_s: float = 0.0) -> None:
        for _ in range(count):
            self.passes(gap_s, "other")
            self.passes(step_s, "useful")
            self.done += 1
            if self.done in self._took:
                before = self._took[self.done]
                self.truth.update({"useful": -before, "repeated": before})  # type: ignore[dict-item]
            self._took[self.done] = step_s
            line = {"attempt": self.attempt, "step": self.done, "loss": self.now_s, "step_s": step_s}
            self.metrics.append({"time": self._time(), **line} if self.timed else line)

    def evaluates(self, seconds: float) -> None:
        self.passes(seconds, "evaluation")
        self.says("evaluated", attempt=self.attempt, step=self.done, loss=1.0)

    def saves(self, seconds: float, *, told_after: int = 0) -> None:
        """A save for which training stands, told after it or some steps later."""
        self.passes(seconds, "checkpoints")
        self.saved, step = self.done, self.done
        self.steps(told_after)
        self.says("checkpointed", attempt=self.attempt, step=step, stalled_s=seconds)

    def fails(self, failure_class: str, after_s: float, wait_s: float = 0.0) -> None:
        """Noticed after a while; goes on from the last save."""
        cause = f"after_{failure_class}"
        self.passes(after_s, cause)
        self.says("failed", attempt=self.attempt, failure_class=failure_class, reason="why")
        self.passes(1.5, cause)
        self.done = self.saved
        self.lease(wait_s, 6, cause)

    def is_rebuilt(self) -> None:
        self.says("rebuilding", workers=1, to=2)
        self.steps(1)
        self.passes(0.25, "checkpoints")
        self.saved = self.done
        self.says("checkpointed", attempt=self.attempt, step=self.done, stalled_s=0.25)
        self.passes(1, "resizing")
        self.says("ended", attempt=self.attempt, workers=1)
        self.lease(0.5, 5, "resizing")

    def ends(self, status: str = "succeeded") -> None:
        self.passes(2, "other")
        self.says("finished", status=status, step=self.done, exit_code=0)

    def account(self, now_s: float | None = None) -> Goodput:
        return goodput_of(self.events, self.metrics, None if now_s is None else BEGAN_S + now_s)


def assert_true(found: Goodput, story: Story) -> None:
    expected = {cause: seconds for cause, seconds in story.truth.items() if seconds > 1e-4}
    assert found.queued_s == pytest.approx(expected.pop("queued", 0.0), abs=1e-3)
    assert found.useful_s == pytest.approx(expected.pop("useful", 0.0), abs=1e-3)
    assert dict(found.losses_s) == pytest.approx(expected, abs=1e-3)


def test_a_run_without_trouble_loses_its_start_its_evaluations_its_saves_and_its_end() -> None:
    story = Story()
    story.steps(40)
    story.saves(1.0)
    story.evaluates(3)
    story.steps(20)
    story.ends()
    found = story.account()
    assert_true(found, story)
    assert found.useful_s == pytest.approx(30)
    assert dict(found.losses_s) == pytest.approx(
        {"starting": 10, "checkpoints": 1, "evaluation": 3, "other": 2}, abs=1e-3
    )
    assert (found.steps, found.queued_s, found.wall_s) == (60, pytest.approx(9), pytest.approx(46))
    assert found.goodput == pytest.approx(30 / 46)
    assert found.from_submission == pytest.approx(30 / 55)


def test_text_that_is_tokenized_on_leased_workers_is_no_start() -> None:
    story = Story(tokenizes_s=80)
    story.steps(10)
    story.ends()
    found = story.account()
    assert_true(found, story)
    assert found.losses_s["preparing"] == pytest.approx(80)
    assert found.losses_s["waiting"] == pytest.approx(4)


def test_a_failure_costs_the_time_until_it_is_noticed_the_restart_and_the_steps_that_are_done_again() -> None:
    story = Story()
    story.steps(10)
    story.saves(0.5, told_after=2)
    story.steps(8)
    story.fails("hang", after_s=120, wait_s=30)
    story.steps(12)
    story.ends()
    found = story.account()
    assert_true(found, story)
    assert found.losses_s["after_hang"] == pytest.approx(120 + 1.5 + 6)
    assert found.losses_s["repeated"] == pytest.approx(10 * 0.5)
    assert found.losses_s["waiting"] == pytest.approx(30)


def test_the_time_between_an_end_and_a_resubmission_is_nobodys() -> None:
    story = Story()
    story.steps(10)
    story.saves(0.5)
    story.ends("stopped")
    story.now_s += 100_000
    story.submit()
    story.steps(10)
    story.ends()
    assert_true(story.account(), story)


def test_a_group_that_was_taken_down_because_it_did_not_make_way_is_resized_all_the_same() -> None:
    story = Story()
    story.steps(10)
    story.saves(0.5)
    story.says("rebuilding", workers=2, to=1)
    story.passes(30, "resizing")
    story.lease(0.5, 5, "resizing")
    story.steps(10)
    story.ends()
    assert_true(story.account(), story)


def test_a_job_that_runs_is_accounted_for_until_now_and_one_whose_driver_is_gone_until_its_last_word() -> (
    None
):
    story = Story()
    story.steps(10)
    assert story.account(now_s=story.now_s + 7).losses_s["other"] == pytest.approx(7)
    assert "other" not in story.account().losses_s
    story = Story()
    assert story.account(now_s=story.now_s + 7).losses_s["starting"] == pytest.approx(17)
    assert story.account().goodput is None, "no step yet"


def test_a_group_that_fails_while_others_go_on_stops_nobody() -> None:
    story = Story()
    story.steps(5)
    story.now_s += 0.3
    story.says("failed", attempt=1, failure_class="worker", reason="why", goes_on=True)
    story.says("started", attempt=1, group="1-3", world_size=1, step=5)
    story.says("resized", world_size=2, step=5)
    story.now_s -= 0.3
    story.steps(5, step_s=0.9)
    story.ends()
    assert_true(story.account(), story)


def test_a_line_that_came_late_takes_nothing_from_the_step() -> None:
    story = Story()
    story.steps(10)
    for line in story.metrics[4:7]:  # the writer was busy, and wrote three lines at once
        line["time"] = story.metrics[7]["time"]
    story.ends()
    found = story.account()
    assert found.useful_s == pytest.approx(5)
    assert_true(found, story)


def test_lines_without_a_time_are_placed_by_their_attempt_and_what_they_took() -> None:
    story = Story(timed=False)
    story.steps(10)
    story.evaluates(3)
    story.saves(1.0)
    story.steps(10)
    story.fails("worker", after_s=2)
    story.steps(10)
    story.ends()
    found = story.account()
    assert found.useful_s == pytest.approx(story.truth["useful"])
    assert found.losses_s["repeated"] == pytest.approx(story.truth["repeated"])
    assert found.wall_s + found.queued_s == pytest.approx(story.now_s, abs=1e-3)


def test_a_clock_that_is_set_back_makes_no_time_negative() -> None:
    story = Story()
    story.steps(5)
    story.now_s -= 3600
    story.steps(5)
    story.ends()
    found = story.account()
    assert all(seconds >= 0 for seconds in (found.useful_s, *found.losses_s.values()))


ACTIONS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 8), st.sampled_from([0.1, 0.5, 2.0])),
    st.tuples(st.just("evaluates"), st.sampled_from([0.5, 4.0])),
    st.tuples(st.just("saves"), st.sampled_from([0.05, 1.0])),
    st.tuples(st.just("fails"), st.sampled_from(["worker", "node", "hang"]), st.sampled_from([0.0, 40.0])),
    st.tuples(st.just("is_rebuilt")),
    st.tuples(st.just("resubmitted")),
)


@given(st.lists(ACTIONS, max_size=12))
@settings(max_examples=150, deadline=None)
def test_every_second_is_useful_or_lost_to_its_cause(actions: list[tuple[Any, ...]]) -> None:
    story = Story()
    story.steps(1)
    for name, *arguments in actions:
        if name == "resubmitted":
            story.ends("stopped")
            story.now_s += 500
            story.submit()
            story.done = story.saved
        else:
            getattr(story, name)(*arguments)
        story.steps(1)
    story.ends()
    found = story.account()
    assert found.useful_s + sum(found.losses_s.values()) == pytest.approx(found.wall_s)
    assert_true(found, story)


KINDS = (
    "submitted preparing waiting leased entered started checkpointed evaluated failed recovered rebuilding"
    " ended resized published finished step"
)


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS.split()), st.floats(0, 50), st.integers(1, 9), st.floats(0, 60)),
        max_size=40,
    ),
    st.one_of(st.none(), st.floats(0, 3000)),
)
@settings(max_examples=300, deadline=None)
def test_in_whatever_order_things_are_said_all_time_is_accounted_for_once(
    said: list[tuple[str, float, int, float]], ends: float | None
) -> None:
    """Against the spans in which a job runs, from a submission to its end."""
    events, metrics, now, runs, spans = [], [], 0.0, False, 0.0
    for kind, passes, step, seconds in said:
        now += passes
        spans += passes if runs else 0.0
        time = datetime.fromtimestamp(BEGAN_S + now, UTC).isoformat()
        if kind == "step":
            line = {"time": time, "attempt": 1, "step": step, "loss": now + len(metrics), "step_s": seconds}
            metrics.append(line)
            continue
        facts = {"attempt": 1, "step": step, "stalled_s": seconds, "failure_class": "worker"}
        events.append({"time": time, "kind": kind, **facts})
        runs = kind == "submitted" or (runs and kind != "finished")
    found = goodput_of(events, metrics, None if ends is None else BEGAN_S + now + ends)
    total = found.queued_s + found.wall_s
    assert all(seconds >= -1e-6 for seconds in (found.queued_s, found.useful_s, *found.losses_s.values()))
    assert total <= spans + (ends or 0.0) * runs + 1e-3
    if ends is not None and [event["kind"] for event in events].count("submitted") == 1:
        assert total == pytest.approx(spans + ends * runs, abs=1e-3)
    assert found.goodput is None or 0 <= found.goodput <= 1


def test_a_line_may_stand_for_several_steps_of_a_script() -> None:
    story = Story()
    first = story.now_s
    for step in (10, 20, 30):
        story.now_s += 5.0
        count = 10 if step > 10 else 0  # how long the first ten took is not known
        line = {"attempt": 1, "step": step, "step_s": 0.5 if count else 0.0, "count": count, "loss": None}
        story.metrics.append({"time": story._time(), **line})
    found = goodput_of(story.events, story.metrics)
    assert (found.useful_s, found.steps) == (pytest.approx(10.0), 20)
    assert found.losses_s["starting"] >= 5.0
    assert first > 0
