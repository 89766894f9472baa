"""The allocation against its promises, on random small clusters and by example.

The checks do their own arithmetic (exact fractions, exhaustive placement), none of the allocator's.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cluster.sharing.allocate import YIELDING, allocate
from cluster.sharing.demand import Demand, Grant, Kind, Node

Left = dict[str, dict[str, Fraction]]

AMOUNTS = st.sampled_from([1, 1, 0.5, 2, 3, 0])


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    count = draw(st.integers(1, 3))
    return [
        Node(
            f"n{index}",
            {"CPU": draw(st.integers(0, 4)), "GPU": draw(st.integers(0, 2))},
            name=draw(st.sampled_from(["", "b", "a"])),
        )
        for index in range(count)
    ]


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Node], list[Demand], Kind]:
    """Nodes, demands whose running units fit on them (some on a node that is gone), and a priority."""
    nodes = draw(clusters())
    left = amounts(nodes)
    demands = []
    for index in range(draw(st.integers(1, 5))):
        unit = {"CPU": draw(AMOUNTS), "GPU": draw(st.sampled_from([0, 0, 0, 1]))}
        least = draw(st.sampled_from([1, 1, 2, 3, 0]))
        held = []
        for node in draw(st.lists(st.sampled_from([*left, "gone"]), max_size=4)):
            if node == "gone":
                held.append(node)
            elif fits(unit, left[node]):
                take(left[node], unit)
                held.append(node)
        kind = draw(st.sampled_from(["training", "serving"]))
        most = least + draw(st.integers(0, 3))
        demands.append(Demand(f"h{index}", kind, unit, least, most, tuple(held)))
    return nodes, demands, draw(st.sampled_from(["training", "serving"]))


def amounts(nodes: Sequence[Node]) -> Left:
    return {node.node_id: {key: Fraction(value) for key, value in node.resources.items()} for node in nodes}


def fits(unit: Mapping[str, float], room: Mapping[str, Fraction]) -> bool:
    return all(room.get(key, 0) >= Fraction(value) for key, value in unit.items() if value)


def take(room: dict[str, Fraction], unit: Mapping[str, float], times: int = 1) -> None:
    for key, value in unit.items():
        room[key] = room.get(key, Fraction(0)) - times * Fraction(value)


def occupied(demands: Sequence[Demand], grants: Mapping[str, Grant]) -> dict[str, Counter[str]]:
    """By holder, the units that run or may be started now: on each node the greater of held and granted."""
    return {d.holder: Counter(d.held) | Counter(grants[d.holder].nodes) for d in demands}


def leftover(nodes: Sequence[Node], demands: Sequence[Demand], units: Mapping[str, Counter[str]]) -> Left:
    left = amounts(nodes)
    for demand in demands:
        for node, count in units[demand.holder].items():
            if node in left:
                take(left[node], demand.unit, count)
    return left


def can_place(unit: Mapping[str, float], count: int, left: Left) -> bool:
    """Whether `count` such units fit, by trying every choice of nodes."""
    if count <= 0:
        return True
    for choice in itertools.combinations_with_replacement(left, count):
        rest = {node: dict(room) for node, room in left.items()}
        for node in choice:
            take(rest[node], unit)
        if all(amount >= 0 for room in rest.values() for amount in room.values()):
            return True
    return False


def gave_way(demands: Sequence[Demand], grants: Mapping[str, Grant], nodes: Sequence[Node]) -> bool:
    """Whether any running unit of a live node left its grant."""
    alive = {node.node_id for node in nodes}
    return any(
        Counter(node for node in d.held if node in alive) - Counter(grants[d.holder].nodes) for d in demands
    )


@given(situations())
@settings(max_examples=200, deadline=None)
def test_grants_and_running_units_together_never_exceed_a_node(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    assert grants.keys() == {d.holder for d in demands}
    left = leftover(nodes, demands, occupied(demands, grants))
    assert all(amount >= 0 for room in left.values() for amount in room.values())
    assert all(set(grant.nodes) <= left.keys() for grant in grants.values())


@given(clusters(), st.data())
@settings(max_examples=200, deadline=None)
def test_grants_fit_even_where_holders_claim_more_than_a_node_has(nodes, data):
    demands = []
    for index in range(data.draw(st.integers(1, 4))):
        held = tuple(data.draw(st.lists(st.sampled_from([n.node_id for n in nodes]), max_size=6)))
        kind = data.draw(st.sampled_from(["training", "serving"]))
        demands.append(Demand(f"h{index}", kind, {"CPU": data.draw(AMOUNTS)}, 1, 3, held))
    grants = allocate(nodes, demands, "serving")
    left = leftover(nodes, demands, {holder: Counter(grant.nodes) for holder, grant in grants.items()})
    assert all(amount >= 0 for room in left.values() for amount in room.values())


@given(situations())
@settings(max_examples=150, deadline=None)
def test_a_holder_gets_its_whole_minimum_or_nothing_new_and_never_above_its_maximum(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    alive = {node.node_id for node in nodes}
    for demand in demands:
        held = Counter(node for node in demand.held if node in alive)
        granted = Counter(grants[demand.holder].nodes)
        if demand.kind == "serving":
            assert granted.total() <= demand.max
        else:
            assert granted.total() <= max(demand.max, held.total())
        if granted.total() < demand.min and (demand.kind == "training" or not held):
            assert granted <= held, "a part of a minimum was granted"


@given(situations())
@settings(max_examples=150, deadline=None)
def test_running_units_stay_unless_their_node_is_gone_or_they_must_give_way(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    alive = {node.node_id for node in nodes}
    for demand in demands:
        held = [node for node in demand.held if node in alive]
        granted = list(grants[demand.holder].nodes)
        if demand.kind == "serving":
            secure = held[: demand.min]
            assert granted[: len(secure)] == secure
        elif len(held) >= demand.min:
            assert granted[: len(held)] == held


@given(situations())
@settings(max_examples=150, deadline=None)
def test_no_minimum_waits_while_it_would_fit_without_the_wants(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    if gave_way(demands, grants, nodes):
        return  # places are kept for those who wait; the convergence test follows them
    alive = {node.node_id for node in nodes}
    for waiting in demands:
        missing = waiting.min - grants[waiting.holder].units
        if missing <= 0:
            continue
        event("a minimum waits")
        # What is left if everybody had no more than must stay: minimums, and training that runs.
        must_stay = {}
        for demand in demands:
            held = sum(node in alive for node in demand.held)
            keep = demand.min if demand.kind in YIELDING else max(demand.min, held)
            must_stay[demand.holder] = Counter(grants[demand.holder].nodes[:keep])
        left = leftover(nodes, demands, must_stay)
        gang = waiting.kind == "training" or not must_stay[waiting.holder]
        assert not can_place(waiting.unit, missing if gang else 1, left)


@given(situations())
@settings(max_examples=150, deadline=None)
def test_no_want_of_the_other_tenant_stands_in_the_way_of_the_prioritised_one(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    if gave_way(demands, grants, nodes):
        return
    stay = {}
    for demand in demands:
        keep = grants[demand.holder].units
        if demand.kind != priority:
            keep = demand.min if demand.kind in YIELDING else max(demand.min, len(demand.held))
        stay[demand.holder] = Counter(grants[demand.holder].nodes[:keep])
    left = leftover(nodes, demands, stay)
    for demand in demands:
        if demand.kind == priority and demand.min <= grants[demand.holder].units < demand.max:
            event("a prioritised want waits")
            assert not can_place(demand.unit, 1, left)


@given(situations())
@settings(max_examples=150, deadline=None)
def test_nothing_stays_free_that_somebody_wants(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    if gave_way(demands, grants, nodes):
        return
    left = leftover(nodes, demands, {holder: Counter(grant.nodes) for holder, grant in grants.items()})
    for demand in demands:
        if demand.min <= grants[demand.holder].units < demand.max:
            assert not can_place(demand.unit, 1, left)


@given(situations())
@settings(max_examples=150, deadline=None)
def test_a_grant_does_not_change_without_cause(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    settled = not gave_way(demands, grants, nodes)
    for _ in range(4):
        demands = [replace(d, held=grants[d.holder].nodes) for d in demands]
        again = allocate(nodes, demands, priority)
        if settled:
            assert again == grants
        settled = settled or not gave_way(demands, again, nodes)
        grants = again
    assert settled, "grants still change although every holder follows them"


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_nodes_and_demands_does_not_matter(situation, rng):
    nodes, demands, priority = situation
    shuffled, mixed = list(nodes), list(demands)
    rng.shuffle(shuffled)
    rng.shuffle(mixed)
    assert allocate(shuffled, mixed, priority) == allocate(nodes, demands, priority)


def cpu_nodes(*cpus: float) -> list[Node]:
    return [Node(f"n{index}", {"CPU": amount}) for index, amount in enumerate(cpus)]


def training(holder: str, least: int, most: int, held: Sequence[str] = (), cpus: float = 1) -> Demand:
    return Demand(holder, "training", {"CPU": cpus}, least, most, tuple(held))


def serving(holder: str, least: int, most: int, held: Sequence[str] = (), cpus: float = 1) -> Demand:
    return Demand(holder, "serving", {"CPU": cpus}, least, most, tuple(held))


def units(grants: Mapping[str, Grant]) -> dict[str, int]:
    return {holder: grant.units for holder, grant in grants.items()}


def test_an_elastic_job_starts_on_what_serving_leaves_free():
    grants = allocate(
        cpu_nodes(2, 2), [serving("app", 1, 1, ["n0"], cpus=2), training("job", 1, 4)], "serving"
    )
    assert grants["app"].nodes == ("n0",)
    assert grants["job"].nodes == ("n1", "n1")


def test_wants_go_to_the_tenant_with_priority_once_every_minimum_is_met():
    demands = [serving("app", 1, 4), training("job", 1, 4)]
    assert units(allocate(cpu_nodes(4), demands, "serving")) == {"app": 3, "job": 1}
    assert units(allocate(cpu_nodes(4), demands, "training")) == {"app": 1, "job": 3}


def test_wants_of_one_tenant_are_shared_out_in_turn_and_count_what_runs_already():
    demands = [serving("a", 1, 9), serving("b", 1, 9), serving("c", 1, 2)]
    assert units(allocate(cpu_nodes(8), demands, "serving")) == {"a": 3, "b": 3, "c": 2}
    demands = [serving("a", 1, 9, ["n0"] * 4), serving("b", 1, 9, ["n0"])]
    assert units(allocate(cpu_nodes(8), demands, "serving")) == {"a": 4, "b": 4}


def test_a_running_want_of_serving_gives_way_to_a_minimum_in_two_steps():
    nodes, job = cpu_nodes(2, 2), training("job", 2, 2)
    app = serving("app", 1, 3, ["n0", "n0", "n1"])
    first = allocate(nodes, [app, job], "serving")
    assert first["app"].units == 2
    assert first["job"].units == 0, "granted while the replica that gives way still runs"
    gone = replace(app, held=first["app"].nodes)
    assert units(allocate(nodes, [gone, job], "serving")) == {"app": 2, "job": 2}


def test_what_is_free_is_kept_for_a_minimum_that_waits_for_others_to_give_way():
    # The job needs the free CPU and the one of the second replica; a late app must not take the free one.
    nodes = cpu_nodes(1, 1, 1)
    demands = [serving("app", 1, 2, ["n0", "n1"]), training("job", 2, 2), serving("late", 0, 1)]
    grants = allocate(nodes, demands, "serving")
    assert units(grants) == {"app": 1, "job": 0, "late": 0}


def test_training_that_runs_is_neither_shrunk_nor_moved():
    demands = [training("job", 1, 4, ["n0", "n1", "n1"]), serving("app", 2, 2)]
    grants = allocate(cpu_nodes(2, 2), demands, "serving")
    assert grants["job"].nodes[:3] == ("n0", "n1", "n1")
    assert units(grants) == {"job": 4, "app": 0}
    # ... unless the caller says that it may.
    grants = allocate(cpu_nodes(2, 2), demands, "serving", yielding=("serving", "training"))
    assert units(grants) == {"job": 2, "app": 0}


def test_training_that_lost_a_node_is_completed_elsewhere_or_gives_everything_back():
    job = training("job", 2, 2, ["n0", "gone"])
    assert allocate(cpu_nodes(1, 1), [job], "serving")["job"].nodes == ("n0", "n1")
    assert allocate(cpu_nodes(1), [job], "serving")["job"].nodes == ()


def test_serving_that_lost_a_node_keeps_what_runs_and_takes_what_it_can_get():
    app = serving("app", 3, 3, ["n0", "gone", "gone"])
    assert allocate(cpu_nodes(1, 1), [app], "serving")["app"].nodes == ("n0", "n1")


def test_serving_gives_up_replicas_when_its_want_falls():
    app = serving("app", 1, 1, ["n1", "n0"])
    assert allocate(cpu_nodes(1, 1), [app], "serving")["app"].nodes == ("n1",)


def test_small_units_fill_the_fullest_node_so_that_large_ones_fit_later():
    grants = allocate(
        cpu_nodes(4, 4), [training("a", 1, 1), training("b", 1, 1), training("z", 1, 1, cpus=4)], "serving"
    )
    assert grants["a"].nodes == grants["b"].nodes != grants["z"].nodes
    assert grants["z"].units == 1


def test_a_replica_is_never_split_over_nodes():
    assert allocate(cpu_nodes(3, 3), [serving("app", 1, 4, cpus=2)], "serving")["app"].units == 2
    assert allocate(cpu_nodes(1, 1), [serving("app", 1, 1, cpus=2)], "serving")["app"].units == 0


def test_units_without_gpus_leave_the_gpu_nodes_free():
    nodes = [Node("gpu", {"CPU": 4, "GPU": 4}), Node("plain", {"CPU": 4})]
    assert set(allocate(nodes, [training("job", 4, 4)], "serving")["job"].nodes) == {"plain"}


def test_fractions_add_up_exactly():
    assert allocate(cpu_nodes(1), [training("job", 1, 20, cpus=0.1)], "serving")["job"].units == 10


def test_wants_that_run_give_way_to_wants_of_the_tenant_with_priority():
    demands = [serving("app", 1, 3, ["n0"] * 3), training("job", 1, 2, ["n0"])]
    assert units(allocate(cpu_nodes(4), demands, "serving")) == {"app": 3, "job": 1}
    assert units(allocate(cpu_nodes(4), demands, "training")) == {"app": 2, "job": 1}
    demands[0] = serving("app", 1, 3, ["n0"] * 2)
    assert units(allocate(cpu_nodes(4), demands, "training")) == {"app": 2, "job": 2}


def test_only_units_whose_place_is_of_use_give_way():
    node = Node("n0", {"CPU": 4, "GPU": 1})
    on_gpu = Demand("gpu", "serving", {"CPU": 1, "GPU": 1}, 0, 1, ("n0",))
    job = Demand("job", "training", {"CPU": 1, "GPU": 1}, 1, 1)
    grants = allocate([node], [serving("cpu", 0, 2, ["n0", "n0"]), on_gpu, job], "serving")
    assert units(grants) == {"cpu": 2, "gpu": 0, "job": 0}


def test_minimums_of_the_tenant_with_priority_come_first_where_not_all_fit():
    demands = [serving("z", 1, 1), training("a", 1, 1)]
    assert units(allocate(cpu_nodes(1), demands, "serving")) == {"z": 1, "a": 0}
    assert units(allocate(cpu_nodes(1), demands, "training")) == {"z": 0, "a": 1}


def test_who_asked_first_goes_first_where_minimums_compete():
    demands = [training("a", 1, 1), training("b", 1, 1)]
    assert units(allocate(cpu_nodes(1), demands, "serving", since={"a": 2.0, "b": 1.0})) == {"a": 0, "b": 1}


def test_units_that_were_only_promised_go_before_those_that_run():
    demands = [training("a", 1, 1, ["n0"]), serving("b", 1, 1, ["n0"])]
    grants = allocate(cpu_nodes(1, 1), demands, "training", promised={"a": 1})
    assert grants["b"].nodes == ("n0",)
    assert grants["a"].nodes == ("n1",)


def test_twins_are_refused():
    with pytest.raises(ValueError, match="same holder"):
        allocate(cpu_nodes(1), [training("a", 1, 1), training("a", 1, 1)], "serving")
    with pytest.raises(ValueError, match="same id"):
        allocate([*cpu_nodes(1), *cpu_nodes(1)], [], "serving")


def test_no_nodes_and_no_demands_are_no_error():
    assert allocate([], [], "serving") == {}
    assert allocate([], [training("job", 1, 1)], "serving")["job"].units == 0


def test_a_thousand_nodes_and_two_hundred_demands_take_well_under_a_second():
    rng = random.Random(1)
    nodes = [Node(f"n{index}", {"CPU": 64, "GPU": 8}) for index in range(1000)]
    shapes = [{"CPU": rng.randint(1, 8), "GPU": rng.choice([0, 1, 2, 4])} for _ in range(12)]
    demands = [
        Demand(f"h{index}", rng.choice(["training", "serving"]), rng.choice(shapes), rng.randint(1, 8), 24)
        for index in range(200)
    ]
    started = time.process_time()
    allocate(nodes, demands, "serving")
    # About 0.1 s here; the bound leaves room for a slow machine and still fails on a scan per unit.
    assert time.process_time() - started < 1.0
