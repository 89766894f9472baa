"""Nodes that are avoided: what the allocation, the ledger and the explanation make of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cluster.sharing.allocate import allocate
from cluster.sharing.audit import granted_twice
from cluster.sharing.demand import Demand, Node
from cluster.sharing.explain import explain
from cluster.sharing.ledger import Ledger
from cluster.sharing.node_health import NodeHealth, Report
from tests.cluster.sharing.test_allocate_properties import (
    Situation,
    alive_gangs,
    at_rest,
    can_place,
    leftover,
    situations,
)


def nodes(*cpus: float, avoided: Sequence[int] = ()) -> list[Node]:
    return [
        Node(f"id{index}", {"CPU": amount}, f"worker-{index}", avoided=index in avoided)
        for index, amount in enumerate(cpus, 1)
    ]


def job(name: str, least: int, most: int, held=(), **more) -> Demand:
    return Demand(f"job/{name}", "training", {"CPU": 1}, least, most, tuple(held), **more)


@st.composite
def wary(draw: st.DrawFn) -> Situation:
    """A situation in which some nodes are avoided."""
    there, demands, priority = draw(situations())
    return [replace(node, avoided=draw(st.booleans())) for node in there], demands, priority


# -- the allocation -----------------------------------------------------------------------------------------


def test_wants_leave_a_node_that_is_avoided_empty_and_a_minimum_takes_it_last() -> None:
    there = nodes(2, 2, avoided=[1])
    assert allocate(there, [job("a", 1, 4)], "serving")["job/a"].nodes == ("id2", "id2")
    assert sorted(allocate(there, [job("a", 3, 4)], "serving")["job/a"].nodes) == ["id1", "id2", "id2"]


def test_wants_give_way_before_a_minimum_goes_where_jobs_fail() -> None:
    there = nodes(2, 2, avoided=[1])
    running = job("a", 1, 2, ("id2", "id2"))
    grants = allocate(there, [running, job("b", 1, 1)], "serving")
    assert (grants["job/b"].nodes, grants["job/b"].coming) == ((), ("id2",))
    assert grants["job/a"].nodes == ("id2",)


def test_who_starts_where_jobs_fail_takes_the_room_that_others_left_when_they_moved() -> None:
    there = [Node("good", {"CPU": 2, "GPU": 2}), Node("bad", {"CPU": 2, "GPU": 1}, avoided=True)]
    moves = Demand("job/m", "training", {"CPU": 0.5}, 4, 4, gang=2)
    grants = allocate(
        there, [moves, Demand("job/x", "training", {"CPU": 0.5, "GPU": 1}, 2, 2, gang=2)], "serving"
    )
    assert grants["job/x"].nodes == ("good", "good")
    assert Counter(grants["job/m"].nodes) == {"good": 2, "bad": 2}


def test_who_starts_where_jobs_fail_takes_the_room_of_a_want_that_came_later() -> None:
    there = [
        Node("a", {"CPU": 2, "GPU": 2}),
        Node("b", {"CPU": 3, "GPU": 1}),
        Node("c", {"CPU": 4, "GPU": 1}, avoided=True),
    ]
    demands = [
        Demand("app/grows", "serving", {"GPU": 1}, 1, 3),
        Demand("app/wide", "serving", {"CPU": 2}, 2, 2, gang=2, priority=1),
        Demand("app/want", "serving", {"CPU": 1, "GPU": 1}, 0, 1),
        Demand("job/x", "training", {"CPU": 1, "GPU": 0.5}, 1, 1),
    ]
    grants = allocate(there, demands, "serving")
    assert grants["job/x"].nodes == ("b",)
    assert grants["app/want"].nodes == ()


def test_what_runs_on_a_node_stays_when_it_is_avoided() -> None:
    there = nodes(2, 2, avoided=[1])
    assert allocate(there, [job("a", 1, 2, ("id1", "id1"))], "serving")["job/a"].nodes == ("id1", "id1")


@given(wary())
@settings(max_examples=100, deadline=None)
def test_nothing_new_is_granted_there_beyond_what_a_minimum_lacks(situation: Situation) -> None:
    there, demands, priority = situation
    avoided = {node.node_id for node in there if node.avoided}
    grants = allocate(there, demands, priority)
    for demand in demands:
        placed = Counter((*grants[demand.holder].nodes, *grants[demand.holder].coming))
        new = placed - Counter(demand.held)
        kept = (placed & Counter(demand.held)).total()
        on_avoided = sum(count for node, count in new.items() if node in avoided)
        if on_avoided:
            event("a minimum is on a node that is avoided")
            # Where the last group of a job has to move for another minimum, it stays until the next one runs.
            last = demand.kind == "training" and kept == demand.gang and grants[demand.holder].gave_way_to
            kept -= demand.gang if last else 0
            # A gang that is completed comes with the units that it kept.
            assert on_avoided <= demand.min - kept or demand.gang > 1
            assert kept < demand.min


@given(wary())
@settings(max_examples=100, deadline=None)
def test_a_minimum_is_only_there_if_it_has_no_other_place_without_the_wants(situation: Situation) -> None:
    there, demands, priority = situation
    demands = [replace(demand, held=()) for demand in demands]
    good = [node for node in there if not node.avoided]
    grants = allocate(there, demands, priority)
    for mine in demands:
        granted = grants[mine.holder].nodes
        if not any(node.avoided and node.node_id in granted for node in there):
            continue
        event("a minimum is on a node that is avoided")
        stay = {
            d.holder: Counter() if d is mine else Counter(grants[d.holder].nodes[: d.min]) for d in demands
        }
        assert not can_place(mine, mine.min // mine.gang, leftover(good, demands, stay), good)


@given(wary())
@settings(max_examples=100, deadline=None)
def test_a_minimum_waits_no_more_than_if_no_node_were_avoided(situation: Situation) -> None:
    there = situation[0]
    demands, grants = at_rest(situation)
    for waiting in demands:
        missing = (waiting.min - grants[waiting.holder].units) // waiting.gang
        if missing > 0:
            event("a minimum waits")
            must_stay = {d.holder: Counter(grants[d.holder].nodes[: d.min]) for d in demands}
            starts = not alive_gangs(waiting, there)
            left = leftover(there, demands, must_stay)
            assert not can_place(waiting, missing if starts else 1, left, there)


@given(wary())
@settings(max_examples=100, deadline=None)
def test_a_grant_does_not_change_without_cause_there_either(situation: Situation) -> None:
    demands, _ = at_rest(situation)
    again = allocate(situation[0], demands, situation[2])
    assert all(d.held == again[d.holder].nodes for d in demands)


# -- the ledger ---------------------------------------------------------------------------------------------


def test_a_job_that_failed_on_a_node_starts_again_elsewhere() -> None:
    ledger = Ledger("serving")
    ledger.update_nodes(nodes(2, 2))
    first = ledger.request(job("lm", 2, 2), now=0)
    assert first.nodes == ("id1", "id1")
    ledger.request(job("lm", 2, 2, first.nodes), now=1)
    ledger.update_nodes(nodes(2, 2, avoided=[1]))
    assert ledger.request(job("lm", 2, 2, first.nodes), now=2).nodes == first.nodes, "it runs, and stays"
    ledger.take_events()
    assert ledger.request(job("lm", 2, 2), now=3).nodes == ("id2", "id2")
    (moved,) = ledger.take_events()
    assert moved.cause == "avoided"
    assert moved.reason == (
        "job/lm does not start 2 workers again on worker-1, which fails jobs, and 2 workers came on worker-2;"
        " it has 2 of at most 2 workers"
    )


def test_a_group_that_failed_there_starts_again_elsewhere_while_the_others_go_on() -> None:
    ledger = Ledger("serving", settle_s=0)
    ledger.update_nodes(nodes(1, 1, 1))
    held = ledger.request(job("lm", 1, 2), now=0).nodes
    assert held == ("id1", "id2")
    ledger.request(job("lm", 1, 2, held), now=1)
    ledger.update_nodes(nodes(1, 1, 1, avoided=[1]))
    assert ledger.request(job("lm", 1, 2, ("id2",)), now=2).nodes == ("id2", "id3")


def test_what_a_job_was_told_and_has_yet_to_start_is_not_taken_back() -> None:
    ledger = Ledger("serving")
    ledger.update_nodes(nodes(2, 2))
    assert ledger.request(job("lm", 2, 2), now=0).nodes == ("id1", "id1")
    ledger.update_nodes(nodes(2, 2, avoided=[1]))
    assert ledger.request(job("lm", 2, 2), now=1).nodes == ("id1", "id1")


def test_a_job_that_has_no_other_place_is_promised_it_until_it_runs() -> None:
    ledger = Ledger("serving")
    ledger.update_nodes(nodes(2))
    held = ledger.request(job("lm", 2, 2), now=0).nodes
    ledger.request(job("lm", 2, 2, held), now=1)
    ledger.update_nodes(nodes(2, avoided=[1]))
    for now in range(2, 6):
        assert ledger.request(job("lm", 2, 2), now=now).nodes == held
    assert ledger.request(job("other", 1, 1), now=6).nodes == ()


# -- what is said -------------------------------------------------------------------------------------------


def test_it_is_said_of_a_job_that_waits_beside_a_node_that_is_avoided() -> None:
    ledger = Ledger("serving")
    ledger.update_nodes(nodes(1, 2, avoided=[2]))
    held = ledger.request(job("lm", 1, 3), now=0).nodes
    ledger.request(job("lm", 1, 3, held), now=1)
    assert explain(ledger.snapshot(12), "job/lm").text == (
        "lm has 1 of at most 3 workers; worker-2 has 2 CPU free (it is avoided, since jobs fail there),"
        " worker-1 has 0 CPU free (lm holds 1)"
    )


def test_a_minimum_that_is_kept_off_a_node_that_is_avoided_is_told_the_reason_for_that() -> None:
    ledger = Ledger("serving", patience_s=5)
    ledger.update_nodes(nodes(2, avoided=[1]))
    held = ledger.request(job("small", 1, 1), now=0).nodes
    ledger.request(job("small", 1, 1, held), now=1)
    for now in (1, 7):
        ledger.request(job("large", 2, 2), now=now)
    assert ledger.request(job("late", 1, 1), now=8).nodes == ()
    assert explain(ledger.snapshot(8), "job/late").text.startswith(
        "late waits: 1 worker of 1 CPU needs a place on one node; what is free is kept clear for large, which"
    )


def test_it_is_said_of_a_job_that_has_no_other_place() -> None:
    ledger = Ledger("serving")
    ledger.update_nodes(nodes(1, 2, avoided=[2]))
    ledger.request(job("lm", 2, 2), now=0)
    assert explain(ledger.snapshot(1), "job/lm").text == (
        "lm has all it asked for: 2 workers on worker-1 (1) and worker-2 (1)"
        " (avoided, since jobs fail there: worker-2)"
    )


def test_events_about_trust_say_nothing_about_what_a_node_has() -> None:
    ledger, health = Ledger("serving"), NodeHealth(1)
    ledger.update_nodes(nodes(1))
    ledger.request(job("lm", 1, 1), now=0)
    events = ledger.take_events()
    events.append(health.report(Report("worker-1", "job/lm", "worker", 3, True, 5.0)))
    events += health.changes(5.0)
    ledger.update_nodes(nodes(1, avoided=[1]))
    events += ledger.take_events()
    assert [each.cause for each in events][-2:] == ["node_blamed", "node_avoided"], "the node did not change"
    ledger.request(job("lm", 1, 1, ("id1",)), now=1)
    log = [json.loads(json.dumps(each.as_json())) for each in [*events, *ledger.take_events()]]
    assert granted_twice(log) == []
