"""The allocation against its promises on random small clusters, and against an exhaustive one.

The checks do their own arithmetic (exact fractions, exhaustive placement), none of the allocator's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cluster.sharing.allocate import allocate
from cluster.sharing.demand import Demand, Grant, Kind, Node
from tests.cluster.sharing.packing import packs

Left = dict[str, dict[str, Fraction]]
Gang = tuple[str, ...]
Situation = tuple[list[Node], list[Demand], Kind]

AMOUNTS = st.sampled_from([1, 1, 0.5, 2, 3, 0])


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    count = draw(st.integers(1, 3))
    return [
        Node(
            f"n{index}",
            {"CPU": draw(st.integers(0, 4)), "GPU": draw(st.integers(0, 2))},
            name=draw(st.sampled_from(["", "b", "a"])),
            accelerator=draw(st.sampled_from([None, "H100"])),
        )
        for index in range(count)
    ]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Nodes, demands whose running units fit on them (some on a node that is gone), and a priority."""
    nodes = draw(clusters())
    kinds = {node.node_id: node.accelerator for node in nodes}
    left = amounts(nodes)
    demands = []
    for index in range(draw(st.integers(1, 5))):
        unit = {"CPU": draw(AMOUNTS), "GPU": draw(st.sampled_from([0, 0, 0, 1]))}
        accelerator = draw(st.sampled_from([None, None, None, "H100"]))
        gang = draw(st.sampled_from([1, 1, 1, 2]))
        least = draw(st.sampled_from([1, 1, 2, 3, 0])) * gang
        held: list[str] = []
        for choice in draw(
            st.lists(st.lists(st.sampled_from([*left, "gone"]), min_size=gang, max_size=gang), max_size=3)
        ):
            rest = {node: dict(room) for node, room in left.items()}
            for node in choice:
                if node != "gone":
                    take(rest[node], unit)
            fine = all(accelerator in (None, kinds[node]) for node in choice if node != "gone")
            if fine and all(amount >= 0 for room in rest.values() for amount in room.values()):
                left = rest
                held += choice
        demands.append(
            Demand(
                f"h{index}",
                draw(st.sampled_from(["training", "serving"])),
                unit,
                least,
                least + gang * draw(st.integers(0, 3)),
                tuple(held),
                gang=gang,
                priority=draw(st.sampled_from([0, 0, 0, 1])),
                weight=draw(st.sampled_from([1.0, 1.0, 2.0])),
                accelerator=accelerator,
            )
        )
    return nodes, demands, draw(st.sampled_from(["training", "serving"]))


def amounts(nodes: Sequence[Node]) -> Left:
    return {node.node_id: {key: Fraction(value) for key, value in node.resources.items()} for node in nodes}


def take(room: dict[str, Fraction], unit: Mapping[str, float], times: int = 1) -> None:
    for key, value in unit.items():
        room[key] = room.get(key, Fraction(0)) - times * Fraction(value)


def gangs_of(demand: Demand, nodes: Iterable[str]) -> list[Gang]:
    nodes = list(nodes)
    assert len(nodes) % demand.gang == 0, "a part of a gang"
    return [tuple(nodes[first : first + demand.gang]) for first in range(0, len(nodes), demand.gang)]


def alive_gangs(demand: Demand, nodes: Sequence[Node]) -> list[Gang]:
    """The gangs that run and have lost no node."""
    alive = {node.node_id for node in nodes}
    return [gang for gang in gangs_of(demand, demand.held) if set(gang) <= alive]


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


def can_place(demand: Demand, gangs: int, left: Left, nodes: Sequence[Node]) -> bool:
    """Whether so many gangs fit, by trying every choice of nodes."""
    kinds = {node.node_id: node.accelerator for node in nodes}
    usable = [node for node in left if demand.accelerator in (None, kinds[node])]
    for choice in itertools.combinations_with_replacement(usable, gangs * demand.gang):
        rest = {node: dict(room) for node, room in left.items()}
        for node in choice:
            take(rest[node], demand.unit)
        if all(rest[n].get(key, 0) >= 0 for n in choice for key, value in demand.unit.items() if value):
            return True
    return gangs == 0


def at_rest(situation: Situation) -> tuple[list[Demand], dict[str, Grant]]:
    """The demands and grants once every holder has done what it was told and nothing changes any more."""
    nodes, demands, priority = situation
    for _ in range(10):
        grants = allocate(nodes, demands, priority)
        same = all(sorted(d.held) == sorted(grants[d.holder].nodes) for d in demands)
        demands = [replace(d, held=grants[d.holder].nodes) for d in demands]
        if same:
            assert not any(grant.coming for grant in grants.values()), "a place is kept, and nobody leaves it"
            return demands, grants
    raise AssertionError("grants still change although every holder follows them")


def waits(demand: Demand, grants: Mapping[str, Grant]) -> bool:
    """Whether it takes one gang more and lacks no part of its minimum."""
    return demand.min <= grants[demand.holder].units < demand.max


def level(demand: Demand, gangs: int, nodes: Sequence[Node]) -> Fraction:
    """The weighted dominant share of so many gangs."""
    share = Fraction(0)
    for key, value in demand.unit.items():
        total = sum(Fraction(node.resources.get(key, 0)) for node in nodes)
        if value and total:
            share = max(share, Fraction(value) * demand.gang * gangs / total)
    return share / Fraction(demand.weight)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_grants_and_running_units_together_never_exceed_a_node(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    assert grants.keys() == {d.holder for d in demands}
    left = leftover(nodes, demands, occupied(demands, grants))
    assert all(amount >= 0 for room in left.values() for amount in room.values())
    kinds = {node.node_id: node.accelerator for node in nodes}
    for demand in demands:
        assert all(demand.accelerator in (None, kinds[node]) for node in grants[demand.holder].nodes)


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
@settings(max_examples=200, deadline=None)
def test_gangs_are_whole_and_a_start_is_the_whole_minimum_or_nothing(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    for demand in demands:
        granted = gangs_of(demand, grants[demand.holder].nodes)
        assert len(granted) * demand.gang <= demand.max
        if not alive_gangs(demand, nodes):
            assert not granted or len(granted) * demand.gang >= demand.min


@given(situations())
@settings(max_examples=200, deadline=None)
def test_no_holder_loses_a_gang_of_its_minimum_and_those_that_stay_are_whole(situation):
    nodes, demands, priority = situation
    grants = allocate(nodes, demands, priority)
    for demand in demands:
        held = Counter(alive_gangs(demand, nodes))
        granted = Counter(gangs_of(demand, grants[demand.holder].nodes))
        kept = held & granted
        # Groups of a job may be moved, but not all of them at once.
        least = 1 if demand.kind == "training" and demand.min else demand.min // demand.gang
        assert kept.total() >= min(held.total(), least)
        assert granted.total() * demand.gang >= min(held.total() * demand.gang, demand.min)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_no_minimum_waits_while_it_would_fit_without_the_wants(situation):
    nodes = situation[0]
    demands, grants = at_rest(situation)
    for waiting in demands:
        missing = (waiting.min - grants[waiting.holder].units) // waiting.gang
        if missing <= 0:
            continue
        event("a minimum waits")
        must_stay = {d.holder: Counter(grants[d.holder].nodes[: d.min]) for d in demands}
        left = leftover(nodes, demands, must_stay)
        starts = not alive_gangs(waiting, nodes)
        assert not can_place(waiting, missing if starts else 1, left, nodes)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_no_want_of_a_later_tier_stands_in_the_way_of_an_earlier_one(situation):
    nodes, priority = situation[0], situation[2]
    demands, grants = at_rest(situation)
    for waiting in demands:
        if not waits(waiting, grants):
            continue
        mine = (waiting.kind != priority, -waiting.priority)
        stay = {}
        for other in demands:
            earlier = (other.kind != priority, -other.priority) <= mine
            granted = grants[other.holder].nodes
            stay[other.holder] = Counter(granted if earlier else granted[: other.min])
        event("a want waits")
        assert not can_place(waiting, 1, leftover(nodes, demands, stay), nodes)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_no_equal_keeps_more_than_one_that_waits_could_take_from_it(situation):
    nodes = situation[0]
    demands, grants = at_rest(situation)
    granted = {d.holder: gangs_of(d, grants[d.holder].nodes) for d in demands}
    for poor in demands:
        if not waits(poor, grants):
            continue
        mine = level(poor, len(granted[poor.holder]), nodes)
        for rich in demands:
            if rich is poor or (rich.kind, rich.priority) != (poor.kind, poor.priority):
                continue
            has = granted[rich.holder]
            for gone in range(1, len(has) - rich.min // rich.gang + 1):
                if level(rich, len(has) - gone, nodes) <= mine:
                    break
                event("an equal has more")
                for kept in itertools.combinations(has, len(has) - gone):
                    stay = {d.holder: Counter(grants[d.holder].nodes) for d in demands}
                    stay[rich.holder] = Counter(itertools.chain(*kept))
                    if poor.gang == 1:
                        assert not can_place(poor, 1, leftover(nodes, demands, stay), nodes)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_nothing_stays_free_that_somebody_wants(situation):
    nodes = situation[0]
    demands, grants = at_rest(situation)
    left = leftover(nodes, demands, {holder: Counter(grant.nodes) for holder, grant in grants.items()})
    for demand in demands:
        if waits(demand, grants):
            assert not can_place(demand, 1, left, nodes)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_a_grant_does_not_change_without_cause(situation):
    demands, _ = at_rest(situation)
    again = allocate(situation[0], demands, situation[2])
    assert all(d.held == again[d.holder].nodes for d in demands)


@given(situations())
@settings(max_examples=200, deadline=None)
def test_whoever_settles_neither_grows_nor_gives_way_to_an_equal(situation):
    nodes, demands, priority = situation
    first = demands[0]
    grants = allocate(nodes, demands, priority, settling=[first.holder])
    held, granted = alive_gangs(first, nodes), gangs_of(first, grants[first.holder].nodes)
    # A gang that moves has its next place and, until it runs there, the one before.
    for _ in range(10):
        following = [replace(d, held=grants[d.holder].nodes) for d in demands]
        grants = allocate(nodes, following, priority, settling=[first.holder])
        if all(d.held == grants[d.holder].nodes for d in following):
            break
    else:
        raise AssertionError("it never comes to rest")
    assert grants[first.holder].units <= max(len(first.held), first.min)
    equals = all((d.kind, d.priority) == (first.kind, first.priority) for d in demands)
    started = all(d.min <= len(alive_gangs(d, nodes)) * d.gang for d in demands)
    if equals and started and "gone" not in first.held:
        assert granted == held[: first.max // first.gang]


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_order_of_nodes_and_demands_does_not_matter(situation, rng):
    nodes, demands, priority = situation
    shuffled, mixed = list(nodes), list(demands)
    rng.shuffle(shuffled)
    rng.shuffle(mixed)
    assert allocate(shuffled, mixed, priority) == allocate(nodes, demands, priority)


# -- against an exhaustive allocator ------------------------------------------------------------------------


def exhaustive(room: Sequence[int], demands: Sequence[Demand], priority: Kind) -> dict[str, int]:
    """Units a holder where nobody runs yet, each decision by trying every packing of all units."""

    def possible(units: Mapping[str, int]) -> bool:
        sizes = [int(d.unit["CPU"]) for d in demands for _ in range(units[d.holder])]
        return packs(tuple(sorted(sizes, reverse=True)), tuple(sorted(room, reverse=True)))

    def tier(demand: Demand) -> tuple[bool, int]:
        return (demand.kind != priority, -demand.priority)

    units = {d.holder: 0 for d in demands}
    for demand in sorted(demands, key=lambda d: (*tier(d), d.holder)):
        started = {**units, demand.holder: demand.min}
        if possible(started):
            units = started
    total = sum(room)
    for now in sorted({tier(d) for d in demands}):
        growing = [d for d in demands if tier(d) == now and units[d.holder] >= d.min]
        while growing:
            growing = [d for d in growing if units[d.holder] < d.max]
            for demand in sorted(
                growing,
                key=lambda d: (
                    Fraction(units[d.holder]) * Fraction(d.unit["CPU"]) / total / Fraction(d.weight),
                    units[d.holder],
                    d.holder,
                ),
            )[:1]:
                more = {**units, demand.holder: units[demand.holder] + demand.gang}
                if possible(more):
                    units = more
                else:
                    growing.remove(demand)
    return units


@st.composite
def powers_of_two(draw: st.DrawFn) -> tuple[list[int], list[Demand], Kind]:
    """Nodes of four devices, and units of one, two or four: what accelerators and their groups are like."""
    room = [4] * draw(st.integers(1, 4))
    demands = []
    for index in range(draw(st.integers(1, 4))):
        gang = draw(st.sampled_from([1, 1, 2]))
        least = gang * draw(st.integers(0, 2))
        demands.append(
            Demand(
                f"h{index}",
                draw(st.sampled_from(["training", "serving"])),
                {"CPU": draw(st.sampled_from([1, 1, 2, 4]))},
                least,
                least + gang * draw(st.integers(0, 4)),
                gang=gang,
                priority=draw(st.sampled_from([0, 0, 1])),
                weight=draw(st.sampled_from([1.0, 2.0])),
            )
        )
    return room, demands, draw(st.sampled_from(["training", "serving"]))


@given(powers_of_two())
@settings(max_examples=200, deadline=None)
def test_an_exhaustive_allocator_grants_as_many_units_to_everyone(situation):
    room, demands, priority = situation
    nodes = [Node(f"n{index}", {"CPU": amount}) for index, amount in enumerate(room)]
    grants = allocate(nodes, demands, priority)
    assert {holder: grant.units for holder, grant in grants.items()} == exhaustive(room, demands, priority)


@given(powers_of_two(), st.data())
@settings(max_examples=200, deadline=None)
def test_elastic_jobs_leave_no_room_that_moves_would_open(situation, data):
    """From any state in which elastic jobs run: nobody waits for what another packing would give."""
    room, demands, priority = situation
    demands = [replace(d, kind="training", priority=0, min=d.gang * min(2, d.max // d.gang)) for d in demands]
    nodes = [Node(f"n{index}", {"CPU": amount}) for index, amount in enumerate(room)]
    left = amounts(nodes)
    running = []
    for demand in demands:
        held: list[str] = []
        for _ in range(data.draw(st.integers(0, demand.max // demand.gang))):
            for node in data.draw(st.permutations(sorted(left))):
                if left[node]["CPU"] >= demand.gang * demand.unit["CPU"]:
                    take(left[node], demand.unit, demand.gang)
                    held += [node] * demand.gang
                    break
        running.append(replace(demand, held=tuple(held)))
    for _ in range(8):
        grants = allocate(nodes, running, priority)
        running = [replace(d, held=grants[d.holder].nodes) for d in running]
    got = {holder: grant.units for holder, grant in grants.items()}
    # The last group of a job is not moved.
    if all(got[d.holder] >= max(2 * d.gang, d.min) for d in demands):
        event("all have several groups")
        for demand in demands:
            if got[demand.holder] < demand.max:
                more = {**got, demand.holder: got[demand.holder] + demand.gang}
                sizes = [int(d.unit["CPU"]) for d in demands for _ in range(more[d.holder])]
                assert not packs(tuple(sorted(sizes, reverse=True)), tuple(room))


@given(clusters(), st.data())
@settings(max_examples=150, deadline=None)
def test_units_that_stand_apart_never_meet(nodes, data):
    demands = []
    for index in range(data.draw(st.integers(1, 4))):
        apart = data.draw(st.booleans())
        names = [node.node_id for node in nodes]
        held = tuple(data.draw(st.lists(st.sampled_from(names), max_size=4, unique=apart)))
        kind = data.draw(st.sampled_from(["training", "serving"]))
        least = data.draw(st.integers(0, 3))
        unit = {"CPU": data.draw(AMOUNTS)}
        demands.append(Demand(f"h{index}", kind, unit, least, least + 2, held, apart=apart))
    grants = allocate(nodes, demands, "serving")
    left = leftover(nodes, demands, {holder: Counter(grant.nodes) for holder, grant in grants.items()})
    assert all(amount >= 0 for room in left.values() for amount in room.values())
    for demand in demands:
        told = Counter((*grants[demand.holder].nodes, *grants[demand.holder].coming))
        assert not demand.apart or max(told.values(), default=0) <= 1
