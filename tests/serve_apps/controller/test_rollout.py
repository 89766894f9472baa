"""One version takes over from another, in simulated time: whatever fails, the old one goes on serving."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import RequestError
from serve_apps.controller.changes import begin, follow_model, on_trial, roll_back, same_but_weights
from serve_apps.controller.decision import Seen
from serve_apps.controller.record import AppRecord
from serve_apps.controller.rollout import decide
from tests.serve_apps.controller.world import TICK_S, World, spec_of

WAYS = ("rolling", "blue_green", "in_place")


def finish(world: World, wanted: int, ticks: int = 400) -> int:
    """Let the rollout end; the least number of replicas that took requests meanwhile."""
    fewest = world.taking()
    for _ in range(ticks):
        world.step(wanted)
        fewest = min(fewest, world.taking())
        held = sum(map(len, world.applications.values()))
        assert held <= world.devices
        if world.record.update is None and len(world.applications) == 1 and world.taking() >= wanted:
            return fewest
    raise AssertionError(f"the rollout did not end: {world.record.update}")


@given(
    way=st.sampled_from(WAYS),
    replicas=st.integers(1, 6),
    spare=st.integers(0, 6),
    seed=st.integers(0, 2**16),
    start_s=st.floats(0.5, 20),
    latency_s=st.floats(0, 2),
    restarts=st.lists(st.integers(1, 60), max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_a_good_version_takes_over_and_capacity_stays(
    way: str, replicas: int, spare: int, seed: int, start_s: float, latency_s: float, restarts: list[int]
) -> None:
    if way == "blue_green":
        spare = replicas
    world = World(replicas + spare, seed, start_s, latency_s=latency_s).serving(1, replicas)
    world.change(spec_of(2, way, replicas, hold_s=5))
    fewest = world.taking()
    for tick in range(2000):
        if tick in restarts:
            world.forget()
        world.step(replicas)
        fewest = min(fewest, world.taking())
        assert sum(map(len, world.applications.values())) <= world.devices
        if world.record.update is None:
            break
    outcome = world.record.outcome
    assert outcome is not None
    assert (outcome.status, outcome.to_version) == ("succeeded", "m@2")
    assert world.record.serving is not None
    assert world.record.serving.spec.model_version == "m@2"
    assert len(world.record.revisions) == 1
    if way == "blue_green" or (way == "rolling" and spare > 0 and not restarts):
        assert fewest >= replicas
    elif way == "rolling" and not restarts:
        assert fewest >= replicas - 1


@given(
    way=st.sampled_from(WAYS),
    wrong=st.sampled_from(["start", "probe", "hang", "errors", "refuse"]),
    replicas=st.integers(1, 5),
    spare=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=300, deadline=None)
def test_a_bad_version_goes_back_by_itself(
    way: str, wrong: str, replicas: int, spare: int, seed: int
) -> None:
    if way == "in_place" and wrong in ("start", "hang"):
        wrong = "refuse"
    if way != "in_place" and wrong == "refuse":
        wrong = "start"
    if way == "blue_green":
        spare = max(spare, replicas)
    if way == "rolling" and replicas + spare == 1 and wrong in ("start", "hang"):
        wrong = "probe"  # the only replica takes other weights: nothing is started
    world = World(replicas + spare, seed, broken={"m@2": wrong}).serving(1, replicas)
    world.change(spec_of(2, way, replicas, ready_timeout_s=20, hold_s=60, watch_s=120))
    fewest = world.taking()
    for _ in range(3000):
        world.step(replicas)
        fewest = min(fewest, world.taking())
        active = world.record.serving
        settled = world.record.update is None and len(world.record.revisions) == 1
        if settled and active is not None and active.spec.model_version == "m@1":
            break
    else:
        raise AssertionError(f"it did not go back: {world.record}")
    finish(world, replicas)
    assert "m@2" in world.record.rejected
    assert world.record.outcome is not None
    assert world.record.outcome.reason
    # The old one never stopped: with a device to spare no replica was missing.
    paused = way == "in_place" and wrong == "probe"
    if wrong != "errors" and (spare > 0 or wrong == "refuse") and not paused:
        assert fewest >= replicas


@given(
    way=st.sampled_from(WAYS),
    replicas=st.integers(1, 4),
    spare=st.integers(0, 4),
    seed=st.integers(0, 2**16),
    after=st.integers(0, 60),
)
@settings(max_examples=200, deadline=None)
def test_it_goes_back_when_somebody_asks_for_it(
    way: str, replicas: int, spare: int, seed: int, after: int
) -> None:
    if way == "blue_green":
        spare = max(spare, replicas)
    world = World(replicas + spare, seed).serving(1, replicas)
    world.change(spec_of(2, way, replicas, hold_s=10))
    for _ in range(after):
        world.step(replicas)
    world.record = roll_back(world.record, world.now)
    finish(world, replicas)
    assert world.record.serving is not None
    assert world.record.serving.spec.model_version == "m@1"
    assert "m@2" in world.record.rejected


def test_blue_green_switches_at_once_and_goes_back_at_once_while_it_holds() -> None:
    world = World(4).serving(1, 2)
    world.change(spec_of(2, "blue_green", 2, hold_s=30))
    while world.record.update is not None and world.record.update.switched_at is None:
        world.step(2)
    switched = world.now
    for _ in range(10):
        world.step(2)
    (old,) = [r for r in world.record.revisions if r.spec.model_version == "m@1"]
    assert world.ready(old.application) == 2
    world.record = roll_back(world.record, world.now)
    decision = world.step(2)
    assert decision.traffic == {old.number}
    assert world.now - switched < 10
    finish(world, 2)


def test_blue_green_without_room_says_so_and_changes_nothing() -> None:
    world = World(3).serving(1, 2)
    world.change(spec_of(2, "blue_green", 2))
    assert finish(world, 2) == 2
    assert world.record.outcome is not None
    assert world.record.outcome.status == "failed"
    assert "no room for a second set of 2 replicas" in world.record.outcome.reason


def test_a_first_version_that_cannot_start_leaves_nothing() -> None:
    world = World(2, broken={"m@1": "start"})
    world.change(spec_of(1))
    for _ in range(100):
        world.step(1)
    assert world.record.removed
    assert world.record.revisions == ()
    assert world.applications == {}
    assert world.record.outcome is not None
    assert (world.record.outcome.status, world.record.outcome.reason) == ("failed", "it does not start")


def test_a_first_version_without_room_is_given_up() -> None:
    world = World(1)
    world.change(spec_of(1, replicas=2))
    began = world.now
    while world.record.revisions:
        world.step(2)
    assert world.record.outcome is not None
    assert "no room for 2 replicas" in world.record.outcome.reason
    assert 30 <= world.now - began <= 30 + 4 * TICK_S


def test_without_requests_there_are_no_replicas_and_the_next_one_brings_one_back() -> None:
    world = World(2).serving(1, 1)
    assert world.record.serving is not None
    idle = replace(world.record.serving, spec=spec_of(1, replicas=0))
    world.record = replace(world.record, revisions=(idle,))
    for _ in range(30):
        decision = world.step(0)
        # While requests are in flight nothing is taken away under them.
        assert not decision.traffic
    assert world.applications == {idle.application: []}
    taken = None
    for _ in range(30):
        decision = world.step(1)
        assert (idle.number in decision.traffic) == (world.ready(idle.application) > 0)
        taken = taken or (world.now if decision.traffic else None)
    assert taken is not None


def test_the_only_replica_takes_other_weights_where_there_is_no_device_for_another() -> None:
    world = World(1).serving(1, 1)
    world.change(spec_of(2))
    finish(world, 1)
    assert list(world.applications) == ["chat:1"]
    assert world.loaded == {"chat:1": 2}
    outcome = world.record.outcome
    assert outcome is not None
    assert (outcome.status, outcome.strategy) == ("succeeded", "rolling")
    assert 0 < outcome.pause_s < 6


def test_where_it_cannot_it_makes_way_for_a_new_one() -> None:
    world = World(1, broken={"m@2": "refuse"}).serving(1, 1)
    world.change(spec_of(2))
    finish(world, 1)
    assert list(world.applications) == ["chat:2"]
    assert world.record.outcome is not None
    assert world.record.outcome.status == "succeeded"


def test_what_it_is_already_is_no_change() -> None:
    world = World(2).serving(1, 1)
    assert begin(world.record, spec_of(1), world.now) is world.record


def test_a_name_is_followed_but_not_to_what_has_failed() -> None:
    world = World(2).serving(1, 1)
    assert follow_model(world.record, spec_of(1), 0.0) == world.record
    failed = replace(world.record, rejected=("m@2",))
    assert follow_model(failed, spec_of(2), 0.0) == failed
    followed = follow_model(failed, spec_of(3), 0.0)
    assert followed.wanted == spec_of(3)
    assert followed.outcome is not None
    assert followed.outcome.reason == f"{spec_of(3).config.model} changed"
    # Once it has meant something else, what failed may be tried again.
    assert followed.rejected == ()
    assert follow_model(failed, spec_of(1), 0.0).rejected == ()


@given(
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    replicas=st.integers(1, 4),
    spare=st.integers(0, 4),
    seed=st.integers(0, 2**16),
    after=st.integers(0, 60),
    again=st.integers(0, 40),
    last=st.sampled_from([1, 3, 4]),
    wrong=st.sampled_from(["", "hang", "probe", "start"]),
)
@settings(max_examples=300, deadline=None)
def test_what_is_asked_for_last_is_what_it_becomes(
    ways: tuple[str, str], replicas: int, spare: int, seed: int, after: int, again: int, last: int, wrong: str
) -> None:
    """An update is superseded by another, that perhaps by a third, or by what serves already."""
    if "blue_green" in ways:
        spare = max(spare, replicas)
    broken = {"m@2": wrong} if wrong and ways[0] != "in_place" else {}
    world = World(replicas + spare, seed, broken=broken).serving(1, replicas)
    world.change(spec_of(2, ways[0], replicas, hold_s=5, ready_timeout_s=20))
    for _ in range(after):
        world.step(replicas)
    world.change(spec_of(3, ways[1], replicas, hold_s=5, ready_timeout_s=60))
    asked = world.record.newest
    for _ in range(again):
        world.step(replicas)
    world.forget()
    if last != 3:
        world.change(spec_of(last, ways[1], replicas, hold_s=5, ready_timeout_s=60))
    for _ in range(4000):
        world.step(replicas)
        if (
            world.record.update is None
            and world.record.successor is None
            and len(world.record.revisions) == 1
        ):
            break
    serving, outcome = world.record.serving, world.record.outcome
    assert serving is not None
    assert outcome is not None
    assert serving.spec.model_version == f"m@{last}"
    assert outcome.status in ("succeeded", "rolled_back")
    assert world.record.newest >= asked


@pytest.mark.parametrize("after", [0, 1, 3, 20])
@pytest.mark.parametrize("wrong", ["", "hang", "probe"])
def test_a_first_version_gives_way_to_what_is_asked_for_instead(after: int, wrong: str) -> None:
    world = World(2, broken={"m@1": wrong} if wrong else {})
    world.change(spec_of(1, ready_timeout_s=30))
    for _ in range(after):
        if not world.record.removed:
            world.step(1)
    if world.record.removed:
        return  # it had failed by then
    world.change(spec_of(2))
    finish(world, 1)
    assert world.record.serving is not None
    assert world.record.serving.spec.model_version == "m@2"
    assert len(world.applications) == 1


def test_going_back_is_the_last_word_too() -> None:
    world = World(3).serving(1, 1)
    world.change(spec_of(2))
    world.step(1)
    world.change(spec_of(3))
    world.record = roll_back(world.record, world.now)
    finish(world, 1)
    assert world.record.serving is not None
    assert world.record.serving.spec.model_version == "m@1"


def test_what_was_superseded_is_not_held_to_have_failed() -> None:
    world = World(3).serving(1, 1)
    world.change(spec_of(2))
    world.step(1)
    world.change(spec_of(3))
    assert world.record.wanted == spec_of(3)
    assert "m@2" not in world.record.rejected
    assert AppRecord.from_json(world.record.as_json()) == world.record


def test_there_is_nothing_to_go_back_to_at_first() -> None:
    world = World(2)
    world.change(spec_of(1))
    with pytest.raises(RequestError, match="for the first time"):
        roll_back(world.record, world.now)
    world.serving(1, 1)
    with pytest.raises(RequestError, match="no other version"):
        roll_back(world.record, world.now)


def test_in_place_is_for_other_weights_only() -> None:
    old, new = spec_of(1), spec_of(2, "in_place")
    assert same_but_weights(old, new)
    larger = replace(new, config=new.config.model_copy(update={"tensor": 2}))
    assert not same_but_weights(old, larger)
    world = World(2).serving(1, 1)
    world.change(larger)
    assert world.record.update is not None
    assert world.record.update.strategy == "rolling"


def test_a_record_survives_its_json() -> None:
    world = World(4).serving(1, 2)
    world.change(spec_of(2, "blue_green", 2))
    for _ in range(5):
        world.step(2)
    assert AppRecord.from_json(world.record.as_json()) == world.record


@pytest.mark.parametrize(
    ("requests", "errors", "goes"), [(2, 2, True), (9, 1, False), (30, 3, False), (30, 4, True)]
)
def test_an_error_rate_is_of_ten_requests_at_least(requests: int, errors: int, goes: bool) -> None:
    world = World(devices=2).serving(1, 1)
    world.change(spec_of(2, "in_place", watch_s=60))
    finish(world, 1)
    seen = {2: Seen(ready=1, held=1, granted=1, requests=requests, errors=errors)}
    assert (decide(world.record, seen, 1, world.now).record.update is not None) is goes


def test_what_may_be_taken_back_is_on_trial() -> None:
    world = World(devices=2, broken={"m@3": "errors"}).serving(1, 1)
    assert on_trial(world.record, world.now) == set()
    world.change(spec_of(2, "rolling", watch_s=30))
    assert on_trial(world.record, world.now) == {2}
    finish(world, 1)
    assert on_trial(world.record, world.now) == {2}
    assert on_trial(world.record, world.now + 31) == set()
    assert on_trial(replace(world.record, removed=True), world.now) == set()
    world.change(spec_of(3, "in_place", watch_s=30))
    while not (world.record.active == 3 and world.record.update is not None):
        world.step(1)
    # The way back from it has begun.
    assert 3 in on_trial(world.record, world.now + 31)
    finish(world, 1)
    serving, outcome = world.record.serving, world.record.outcome
    assert serving is not None
    assert serving.spec.model_version == "m@2"
    # It went back as it had come.
    assert outcome is not None
    assert outcome.strategy == "in_place"
    # There is nothing left to go back to: what it came back from is known to be bad.
    assert on_trial(world.record, world.now) == set()
    seen = {serving.number: Seen(ready=1, held=1, granted=1, requests=20, errors=20)}
    assert decide(world.record, seen, 1, world.now).record.update is None


def test_a_way_back_needs_no_room_for_a_second_set() -> None:
    world = World(devices=4).serving(1, 2)
    world.change(spec_of(2, "blue_green", 2, hold_s=1))
    finish(world, 2)
    world.devices = 2
    world.record = roll_back(world.record, world.now)
    finish(world, 2)
    assert world.record.serving is not None
    assert world.record.serving.spec.model_version == "m@1"
