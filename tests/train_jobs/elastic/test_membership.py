"""Which groups take part: agreed on by those who are there, whatever happens to the others."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from train_jobs.elastic.membership import NO_STATE, Beat, Goodbye, Membership, Standing, View, Word

TIMEOUT_S = 2.0


def at(step: int) -> Standing:
    """Of a job that never went back."""
    return Standing(1, 0, step)


def agreed(*groups: str, step: int = 7, now: float = 0.0) -> Membership:
    """A membership whose first view holds these groups."""
    membership = Membership(groups, TIMEOUT_S)
    for group in groups:
        membership.arrive(group, at(step), 1, now)
    assert membership.decide(now) is not None
    return membership


def told(membership: Membership, group: str, standing: Standing, now: float) -> View | Goodbye | None:
    """What a group hears that arrives."""
    membership.arrive(group, standing, 1, now)
    return membership.answer(group, standing, now)


def test_all_hear_that_a_group_saves_until_it_has_done_so_or_is_lost() -> None:
    membership = agreed("a", "b")

    def others_hear(now: float) -> list[bool]:
        waiting = membership.heard(Beat("c", 0, 0), now)  # it has yet to join
        return [membership.heard(Beat("b", 0, 1), now).saves, waiting.saves]

    assert others_hear(0.5) == [False, False]
    membership.heard(Beat("a", 0, 1, saves=True), 0.6)
    assert others_hear(0.7) == [True, True]
    membership.heard(Beat("a", 0, 1, age_s=0.5), 0.8)  # sent before, and late
    assert others_hear(0.9) == [True, True]
    membership.heard(Beat("a", 0, 1), 1.0)
    assert others_hear(1.1) == [False, False]
    membership.heard(Beat("a", 0, 1, saves=True), 1.2)
    assert others_hear(1.2 + TIMEOUT_S) == [True, True]
    assert others_hear(1.3 + TIMEOUT_S) == [False, False], "it has not been heard for too long"


def test_the_first_view_waits_for_all_that_are_being_started() -> None:
    membership = Membership(["a", "b"], TIMEOUT_S)
    membership.arrive("b", NO_STATE, 2, 0)
    assert membership.decide(0) is None
    membership.arrive("a", NO_STATE, 2, 1)
    assert membership.decide(1) == View(1, ("a", "b"), (NO_STATE, NO_STATE))


def test_there_is_no_view_before_it_is_said_who_is_being_started() -> None:
    membership = Membership(None, TIMEOUT_S, patience_s=1)
    membership.arrive("b", NO_STATE, 1, 0)
    membership.ended("c")
    for now in (0, 1, 2):
        membership.heard(Beat("b", 0, 0), now)
        assert membership.decide(now) is None
    membership.expect(["a", "b", "c"])
    membership.expect(["d"])
    membership.patience_s = 10
    assert membership.decide(2) is None
    membership.arrive("a", NO_STATE, 1, 2)
    assert membership.decide(2) == View(1, ("a", "b"), (NO_STATE, NO_STATE))


def test_the_first_view_does_not_wait_for_one_that_ended_while_it_started() -> None:
    membership = Membership(["a", "b"], TIMEOUT_S)
    membership.arrive("a", NO_STATE, 1, 0)
    membership.ended("b")
    view = membership.decide(0)
    assert view is not None
    assert view.groups == ("a",)


def test_the_first_view_does_not_wait_for_one_that_has_to_leave_before() -> None:
    membership = Membership(["a", "b"], TIMEOUT_S)
    membership.leave("b")
    membership.arrive("a", NO_STATE, 1, 0)
    assert membership.decide(0) == View(1, ("a",), (NO_STATE,))


def test_the_first_view_does_not_wait_for_ever_for_one_that_cannot_start() -> None:
    membership = Membership(["a", "b"], TIMEOUT_S, patience_s=10)
    membership.arrive("a", NO_STATE, 1, 0)
    for now in range(1, 11):
        membership.heard(Beat("a", 0, 0), now)
        assert membership.decide(now) is None
    membership.heard(Beat("a", 0, 0), 10.5)
    view = membership.decide(10.5)
    assert view is not None
    assert view.groups == ("a",)


def test_a_newcomer_is_told_to_the_others_and_stands_behind_them() -> None:
    membership = agreed("b", "c")
    assert not membership.heard(Beat("b", 0, 1), 1).change
    membership.arrive("a", NO_STATE, 1, 1)
    assert membership.heard(Beat("b", 0, 1), 1) == Word(change=True)
    membership.arrive("b", at(9), 1, 1)
    assert membership.decide(1) is None, "c is still at its step"
    membership.arrive("c", at(9), 1, 1.5)
    view = membership.decide(1.5)
    assert view == View(2, ("b", "c", "a"), (at(9), at(9), NO_STATE))
    assert view.source("a") == "b"
    assert view.receivers("b") == ("a",)


def test_whoever_lags_by_a_step_takes_the_state_of_one_that_does_not() -> None:
    view = View(3, ("a", "b", "c", "d"), (at(4), at(5), at(5), NO_STATE))
    assert view.current == ("b", "c")
    assert [view.source(group) for group in view.groups] == ["b", None, None, "c"]
    assert view.receivers("b") == ("a",)


def test_what_was_done_before_the_job_went_back_counts_for_nothing() -> None:
    view = View(3, ("a", "b", "c"), (at(9), Standing(1, 1, 4), Standing(1, 1, 3)))
    assert view.current == ("b",)
    assert [view.source(group) for group in view.groups] == ["b", None, "b"]


def test_what_was_done_before_all_began_from_a_checkpoint_again_counts_for_nothing() -> None:
    view = View(7, ("a", "b"), (at(30), Standing(5, 0, 22)))
    assert view.current == ("b",)


def test_a_silent_group_is_lost_and_the_others_give_up_what_they_wait_for() -> None:
    membership = agreed("a", "b")
    assert membership.heard(Beat("a", 0, 1), TIMEOUT_S) == Word()
    assert membership.heard(Beat("a", 0, 1), TIMEOUT_S + 0.1) == Word(change=True, broken=True)
    membership.arrive("a", at(7), 1, TIMEOUT_S + 0.2)
    assert membership.decide(TIMEOUT_S + 0.2) == View(2, ("a",), (at(7),), lost=("b",))


def test_one_silent_rank_is_enough() -> None:
    membership = Membership(["a", "b"], TIMEOUT_S)
    for group in "ab":
        membership.arrive(group, at(7), 2, 0)
    membership.decide(0)
    for rank in (0, 1):
        membership.heard(Beat("a", rank, 1), 3)
    membership.heard(Beat("b", 0, 1), 3)
    assert membership.heard(Beat("a", 0, 1), 3).broken


def test_a_group_thought_lost_comes_back_as_a_newcomer() -> None:
    membership = agreed("a", "b")
    membership.arrive("a", at(8), 1, 3)
    assert membership.decide(3) is not None
    assert membership.heard(Beat("b", 0, 1), 3.1).broken
    membership.arrive("b", at(7), 1, 3.2)
    membership.arrive("a", at(9), 1, 3.3)
    view = membership.decide(3.3)
    assert view is not None
    assert (view.groups, view.source("b")) == (("a", "b"), "a")


def test_a_goodbye_costs_the_others_no_timeout() -> None:
    membership = agreed("a", "b")
    membership.leave("b")
    assert membership.heard(Beat("a", 0, 1), 0.1) == Word(change=True), "nothing is broken"
    assert told(membership, "b", at(8), 0.2) == Goodbye(last=False)
    assert membership.heard(Beat("a", 0, 1), 0.2) == Word(change=True)
    membership.arrive("a", at(8), 1, 0.2)
    assert membership.decide(0.2) == View(2, ("a",), (at(8),), left=("b",))
    assert not membership.heard(Beat("a", 0, 2), 0.3).change


def test_the_others_do_not_wait_for_one_that_has_to_leave() -> None:
    membership = agreed("a", "b")
    membership.leave("b")
    membership.arrive("a", at(8), 1, 0.2)
    assert membership.decide(0.2) == View(2, ("a",), (at(8),), left=("b",))


def test_the_last_one_to_leave_hears_that_it_is() -> None:
    membership = agreed("a", "b")
    membership.leave("a")
    membership.leave("b")
    assert told(membership, "a", at(8), 0.1) == Goodbye(last=True)
    assert told(membership, "b", at(8), 0.1) == Goodbye(last=True)


def test_one_that_has_to_go_while_it_waits_hears_it() -> None:
    membership = agreed("a", "b")
    assert told(membership, "b", at(8), 0.1) is None
    membership.leave("b")
    assert membership.answer("b", at(8), 0.2) == Goodbye(last=False)


def test_one_that_is_thought_lost_while_it_waits_gets_its_answer_once_it_is_heard_again() -> None:
    membership = agreed("a", "b")
    assert told(membership, "b", at(8), 0.1) is None
    membership.arrive("a", at(8), 1, 3)
    assert membership.decide(3) == View(2, ("a",), (at(8),), lost=("b",))
    assert membership.answer("b", at(8), 3.1) is None
    membership.heard(Beat("b", 0, 1), 3.2)
    assert membership.answer("b", at(8), 3.2) is None
    assert membership.heard(Beat("a", 0, 2), 3.3).change
    membership.arrive("a", at(9), 1, 3.4)
    assert membership.decide(3.4) == View(3, ("a", "b"), (at(9), at(8)))
    assert membership.answer("b", at(8), 3.4) == membership.view


def test_one_that_ended_is_not_waited_for_and_may_not_return() -> None:
    membership = agreed("a", "b")
    membership.ended("b")
    membership.arrive("a", at(7), 1, 0.1)
    assert membership.decide(0.1) == View(2, ("a",), (at(7),), lost=("b",))
    assert told(membership, "b", at(7), 0.2) == Goodbye(last=False)
    assert membership.heard(Beat("b", 0, 1), 0.2).broken


def test_after_a_restart_the_groups_say_which_view_they_are_in() -> None:
    view = agreed("a", "b").view
    assert view is not None
    anew = Membership([], TIMEOUT_S)
    assert anew.heard(Beat("a", 0, view.number), 0) == Word(forgotten=True)
    anew.remind(view, 0)
    anew.heard(Beat("b", 0, view.number), 0)
    assert anew.heard(Beat("a", 0, view.number), 0) == Word()
    anew.arrive("c", NO_STATE, 1, 0.1)
    assert anew.heard(Beat("a", 0, view.number), 0.1) == Word(change=True)
    anew.heard(Beat("a", 0, view.number), 3)
    assert anew.heard(Beat("a", 0, view.number), 3).broken, "b has been silent since"


def test_an_old_heartbeat_says_no_more_than_when_it_was_sent() -> None:
    membership = agreed("a", "b")
    membership.heard(Beat("b", 0, 1, age_s=0.5), 1.5)
    membership.heard(Beat("b", 0, 1, age_s=1.5), 1.6)
    assert not membership.heard(Beat("a", 0, 1), 1.0 + TIMEOUT_S).broken
    assert membership.heard(Beat("a", 0, 1), 1.1 + TIMEOUT_S).broken
    membership.heard(Beat("b", 0, 1, age_s=1.0), 1.2 + TIMEOUT_S)
    assert not membership.heard(Beat("a", 0, 1), 1.3 + TIMEOUT_S).broken, "it was only late"


def test_a_heartbeat_costs_no_look_at_all_the_others() -> None:
    looks = 0

    class Counting(dict[int, float]):
        def values(self):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            return super().values()

    names = [f"g{number}" for number in range(200)]
    membership = agreed(*names)
    for group in membership._groups.values():
        group.ranks = Counting(group.ranks)
    for now in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        for name in names:
            assert membership.heard(Beat(name, 0, 1), now) == Word()
    assert looks <= 3 * 2 * len(names), "all are looked at once a timeout, and not at every heartbeat"


class Schools(RuleBasedStateMachine):
    """Random groups that start, step, wait, leave, fall silent and end; each knows the view it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.membership = Membership(["g0"], TIMEOUT_S)
        self.standings: dict[str, Standing] = {"g0": NO_STATE}
        self.in_view: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.silent: set[str] = set()
        self.gone: set[str] = set()
        self.ended: set[str] = set()
        self.last_heard: dict[str, float] = {}

    def _running(self) -> list[str]:
        return [group for group in self.standings if group not in self.gone | self.silent]

    def _beat(self) -> None:
        for group in self._running():
            self.last_heard[group] = self.now
            word = self.membership.heard(Beat(group, 0, self.in_view.get(group, 0)), self.now)
            view = self.membership.view
            if view is not None and self.in_view.get(group, 0):
                in_it = self.in_view[group] == view.number and group in view.groups
                assert word.broken is (not in_it or any(self._is_lost(each) for each in view.groups))
                assert word.change or not word.broken or not in_it

    def _is_lost(self, group: str) -> bool:
        """Whether a group of the view went without a goodbye, as far as anybody can know."""
        silent_s = self.now - self.last_heard[group]
        return group in self.ended or (group not in self.gone and silent_s > TIMEOUT_S)

    def _decide(self) -> None:
        before = self.membership.view
        view = self.membership.decide(self.now)
        if view is not None:
            assert view.number == (before.number if before else 0) + 1
            assert set(view.groups) <= self.waiting - self.gone
            assert view.standings == tuple(self.standings[group] for group in view.groups)
            if before is not None:
                stayed = [group for group in before.groups if group in view.groups]
                assert list(view.groups[: len(stayed)]) == stayed, "those who stay keep their order"
                assert set(view.lost) | set(view.left) == set(before.groups) - set(view.groups)
        for group in sorted(self.waiting - self.silent):
            answer = self.membership.answer(group, self.standings[group], self.now)
            if isinstance(answer, Goodbye):
                self.gone.add(group)
                self.waiting.discard(group)
            elif answer is not None:
                assert answer is view, "an answer is news"
                self.in_view[group] = answer.number
                self.waiting.discard(group)
                self.standings[group] = max(at(0), answer.standing)

    @rule()
    def start(self) -> None:
        self.standings[f"g{len(self.standings)}"] = NO_STATE

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        free = [group for group in self._running() if group not in self.waiting]
        if free:
            self._arrive(data.draw(st.sampled_from(free)))
            self._decide()

    def _arrive(self, group: str) -> None:
        self.membership.arrive(group, self.standings[group], 1, self.now)
        self.last_heard[group] = self.now
        self.waiting.add(group)

    @rule(data=st.data(), what=st.sampled_from(["leave", "end", "fall silent"]))
    def trouble(self, data: st.DataObject, what: str) -> None:
        running = self._running()
        if len(running) > 1:
            group = data.draw(st.sampled_from(running))
            if what == "leave":
                self.membership.leave(group)
            elif what == "end":
                self.membership.ended(group)
                self.ended.add(group)
                self.gone.add(group)
                self.waiting.discard(group)
            else:
                self.silent.add(group)
            self._decide()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.5]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._beat()
        self._decide()

    @precondition(lambda self: len(self._running()) > 0)
    @rule()
    def all_arrive(self) -> None:
        """Once everybody who is there waits, and the silent are noticed, nobody waits any longer."""
        if "g0" in self.silent - self.gone:
            self.membership.ended("g0")  # the first view would wait for it
            self.ended.add("g0")
        self.now += TIMEOUT_S / 2
        self._beat()
        self.now += TIMEOUT_S / 2 + 0.1
        self._beat()
        for group in self._running():
            if group not in self.waiting:
                self._arrive(group)
        self._decide()
        assert not self.waiting - self.silent

    @invariant()
    def a_view_never_holds_a_group_twice(self) -> None:
        view = self.membership.view
        assert view is None or len(set(view.groups)) == len(view.groups)


Schools.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSchools = Schools.TestCase
