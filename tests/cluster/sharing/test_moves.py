"""Groups that move out of the way of others, until everybody has done as told.

Here holders do what they are told, and what they start runs a while later, or at once. The exhaustive packing
knows nothing of the allocator.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cluster.sharing.allocate import allocate
from cluster.sharing.demand import Demand, Grant, Node
from cluster.sharing.explain import explain
from cluster.sharing.ledger import Ledger
from tests.cluster.sharing.packing import packs


def cpu_nodes(*cpus: float) -> list[Node]:
    return [Node(f"n{index}", {"CPU": amount}) for index, amount in enumerate(cpus)]


def job(least: int, most: int, held: Sequence[str], cpus: float = 1, name: str = "job") -> Demand:
    return Demand(name, "training", {"CPU": cpus}, least, most, tuple(held))


def app(least: int, most: int, held: Sequence[str] = (), cpus: float = 2) -> Demand:
    return Demand("app", "serving", {"CPU": cpus}, least, most, tuple(held))


@dataclass
class Cluster:
    """Holders that follow every decision; what they start is `starting` until it is said to run."""

    nodes: Sequence[Node]
    demands: dict[str, Demand]
    starting: dict[str, Counter[str]] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)

    def decide(self, **options: object) -> bool:
        """One decision, and everybody does as told; whether anything changed."""
        promised = {name: self._indexes(name) for name in self.demands}
        self.grants = allocate(
            self.nodes, list(self.demands.values()), "serving", promised=promised, **options
        )
        before = {name: Counter(demand.held) for name, demand in self.demands.items()}
        for name, grant in self.grants.items():
            granted = Counter(grant.nodes)
            self._check(name, granted)
            still = self.starting.get(name, Counter()) & granted
            self.starting[name] = still + (granted - before[name])
            self.demands[name] = replace(self.demands[name], held=grant.nodes)
        return before != {name: Counter(demand.held) for name, demand in self.demands.items()}

    def runs(self, name: str) -> Counter[str]:
        return Counter(self.demands[name].held) - self.starting.get(name, Counter())

    def has(self, name: str) -> list[str]:
        return sorted(self.demands[name].held)

    def _indexes(self, name: str) -> list[int]:
        """Of the units held, those that do not run: of several on one node the last."""
        left, found = Counter(self.starting.get(name, Counter())), []
        for index, node in reversed(list(enumerate(self.demands[name].held))):
            if left[node] > 0:
                left[node] -= 1
                found.append(index)
        return found

    def _check(self, name: str, granted: Counter[str]) -> None:
        """What every decision has to keep: a job goes on, with no more than it asked for."""
        demand, runs = self.demands[name], self.runs(name)
        assert granted.total() <= demand.most
        assert granted.total() >= min(demand.min, runs.total())
        assert granted.total() >= min(demand.min, len(demand.held)), "what starts is left without a place"
        if demand.kind == "training" and demand.min and runs and not demand.rebuilds:
            assert runs & granted, f"of {name} nobody is left that steps"


def cluster(nodes: Sequence[Node], *demands: Demand) -> Cluster:
    return Cluster(nodes, {demand.holder: demand for demand in demands})


def test_a_minimum_moves_once_another_group_of_it_runs_elsewhere():
    world = cluster(cpu_nodes(2, 3), app(1, 2, ["n1"]), job(1, 2, ["n0", "n0"]))
    world.decide()
    assert world.has("job") == ["n0", "n1"], "one goes on where it is, one starts elsewhere"
    assert world.grants["job"].gave_way_to == ("app",)
    assert world.grants["app"].coming == ("n0",)
    assert not world.decide(), "while the newcomer starts"
    world.starting.clear()
    world.decide()
    assert world.has("job") == ["n1"]
    world.decide()
    assert world.has("app") == ["n0", "n1"]
    assert not world.decide()


def test_a_job_of_a_fixed_number_of_groups_moves_them_in_turn():
    world = cluster(cpu_nodes(2, 3, 1), app(1, 2, ["n1"]), job(2, 2, ["n0", "n0"]))
    world.decide()
    assert world.has("job") == ["n0", "n1"]
    assert world.grants["job"].coming == ("n2",), "a place is kept for the second"
    assert not world.decide()
    world.starting.clear()
    world.decide()
    assert world.has("job") == ["n1", "n2"]
    world.decide()
    assert world.has("app") == ["n0", "n1"]


def two_jobs_in_the_way(y: Demand) -> Cluster:
    """Of x a group leaves n0 and another makes room for the one of y, which moves there."""
    other = Demand("other", "training", {"CPU": 2}, 1, 1, ("n1",))
    x = job(1, 3, ["n0", "n1", "n2"], 2, "x")
    return cluster(cpu_nodes(4, 4, 2), app(0, 1, cpus=4), other, x, y)


def test_a_group_moves_where_another_job_can_spare_one():
    world = two_jobs_in_the_way(job(1, 2, ["n0"], 2, "y"))
    world.decide()
    assert (world.has("x"), world.has("y")) == (["n1"], ["n0"])
    assert world.grants["y"].coming == ("n2",)
    world.decide()
    assert world.has("y") == ["n0", "n2"]
    world.starting.clear()
    world.decide()
    assert world.has("y") == ["n2"]
    world.decide()
    assert world.has("app") == ["n0"]


def test_a_job_that_only_starts_moves_where_there_is_room_at_once_or_not_at_all():
    world = two_jobs_in_the_way(job(1, 2, ["n0"], 2, "y"))
    world.starting["y"] = Counter(["n0"])
    world.decide()
    assert world.has("y") == ["n0"]
    world = cluster(cpu_nodes(2, 3), app(1, 2, ["n1"]), job(1, 2, ["n0"]))
    world.starting["job"] = Counter(["n0"])
    world.decide()
    assert world.has("job") == ["n1"]


def test_a_job_that_is_built_anew_moves_at_once_when_all_its_places_are_free():
    fixed = cluster(cpu_nodes(2, 3, 1), app(1, 2, ["n1"]), replace(job(2, 3, ["n0", "n0"]), rebuilds=True))
    fixed.decide()
    assert fixed.has("job") == ["n1", "n2"]
    world = two_jobs_in_the_way(replace(job(1, 2, ["n0"], 2, "y"), rebuilds=True))
    world.decide()
    assert world.has("y") == ["n0"]
    world.decide()
    assert world.has("y") == ["n2"]
    world.decide()
    assert world.has("app") == ["n0"]


def test_a_job_that_may_have_one_group_only_does_not_move():
    world = cluster(cpu_nodes(2, 3), app(1, 2, ["n1"]), job(1, 1, ["n0"]))
    assert not world.decide()


def test_what_can_be_spared_leaves_and_only_the_rest_moves():
    x, y = job(1, 2, ["n0"], name="x"), job(1, 2, ["n0", "n0"], name="y")
    world = cluster(cpu_nodes(3, 1), app(0, 1), x, y)
    world.decide()
    assert world.has("x") == ["n0"]
    world.starting.clear()
    while world.decide():
        world.starting.clear()
    assert (world.has("x"), world.has("y"), world.has("app")) == (["n0"], ["n1"], ["n0"])


@pytest.mark.parametrize("first", [True, False])
def test_a_job_that_settles_moves_for_those_that_go_first_only(first):
    other = replace(job(0, 1, [], 2, "other"), priority=1 if first else 0)
    world = cluster(cpu_nodes(2, 2), other, job(2, 2, ["n0", "n1"]))
    world.decide(settling=["job"])
    assert len(set(world.has("job"))) == (1 if first else 2)


def test_the_ledger_moves_a_minimum_though_it_has_just_started():
    """A replica stands elsewhere than it was told, and the job has only just started in its place."""
    ledger = Ledger("serving", settle_s=10)
    ledger.update_nodes(cpu_nodes(2, 2))
    assert ledger.request(app(1, 1), now=0).nodes == ("n0",)
    ledger.request(app(1, 1, ["n1"]), now=1)
    groups = ["n0", "n0"]
    assert list(ledger.request(job(1, 2, []), now=2).nodes) == groups
    ledger.request(job(1, 2, groups), now=3)
    ledger.update_nodes(cpu_nodes(2, 3))
    assert ledger.request(app(1, 2, ["n1"]), now=4).units == 1
    assert sorted(ledger.request(job(1, 2, groups), now=4.5).nodes) == ["n0", "n1"]
    assert "a place is kept for it on n0" in explain(ledger.snapshot(4.6), "app").text
    said = explain(ledger.snapshot(4.6), "job").text
    assert "it moves to make room for app (serving goes first), and has its place until" in said
    starts = replace(job(1, 2, ["n0", "n1"]), starting=("n1",))
    for now in (5, 9, 13):
        assert sorted(ledger.request(starts, now).nodes) == ["n0", "n1"]
        assert ledger.request(app(1, 2, ["n1"]), now).units == 1
    assert ledger.request(job(1, 2, ["n0", "n1"]), now=14).nodes == ("n1",)
    assert ledger.request(app(1, 2, ["n1"]), now=15).units == 1, "granted while a group is still there"
    ledger.request(job(1, 2, ["n1"]), now=16)
    assert sorted(ledger.request(app(1, 2, ["n1"]), now=17).nodes) == ["n0", "n1"]
    causes = [event.cause for event in ledger.take_events() if event.holder == "job"]
    assert causes.count("gave_way") == 2


# -- against an exhaustive packing --------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> Cluster:
    """Nodes of up to four devices; small groups of jobs that run in the way of large replicas, and others."""
    nodes = [Node(f"n{index}", {"CPU": draw(st.sampled_from([4, 4, 3, 2]))}) for index in range(3)]
    left = {node.node_id: int(node.resources["CPU"]) for node in nodes}
    demands = []
    for index in range(draw(st.integers(2, 4))):
        kind = draw(st.sampled_from(["training", "serving"]))
        size = draw(st.sampled_from([2, 4] if kind == "serving" else [1, 1, 2]))
        gang = draw(st.sampled_from([1, 1, 1, 2])) if kind == "training" else 1
        least = draw(st.sampled_from([1, 1, 2]))
        most = least + draw(st.integers(1, 3))
        held = []
        for _ in range(draw(st.integers(least, most))):
            usable = [node for node, room in left.items() for _ in range(room // size)]
            if len(usable) >= gang:
                places = draw(st.permutations(usable))[:gang]
                held += places
                for node in places:
                    left[node] -= size
        rebuilds = kind == "training" and gang == 1 and draw(st.integers(0, 4)) == 0
        words = (f"h{index}", kind, {"CPU": size}, least * gang, most * gang, tuple(held))
        demands.append(Demand(*words, gang=gang, rebuilds=rebuilds))
    return cluster(nodes, *demands)


@given(worlds(), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_no_app_waits_for_room_that_moves_of_minimums_would_open(world, pace):
    """Elastic jobs keep their minimums, but not the places of them; nothing is moved for ever.

    Groups do not move for the sake of groups that move.
    """
    for turn in range(60):
        if not world.decide() and not any(starting.total() for starting in world.starting.values()):
            break
        if turn % pace == 0:
            world.starting.clear()
    else:
        raise AssertionError("it never comes to rest")
    assert not any(grant.coming for grant in world.grants.values()), "a place is kept, and nobody leaves it"
    jobs = [demand for demand in world.demands.values() if demand.kind == "training"]
    if any(demand.gang > 1 or len(demand.held) < demand.min for demand in jobs):
        return
    room = {node.node_id: int(node.resources["CPU"]) for node in world.nodes}
    for demand in world.demands.values():
        for node in demand.held if demand.kind == "serving" else ():
            room[node] -= int(demand.unit["CPU"])
    for waiting in world.demands.values():
        alone = waiting.held or waiting.min == 1
        if waiting.kind == "serving" and len(waiting.held) < waiting.max and alone:
            event("an app waits")
            assert not any(_opens(node, int(waiting.unit["CPU"]), room, jobs) for node in room)


def _opens(node: str, size: int, room: Mapping[str, int], jobs: Sequence[Demand]) -> bool:
    """Whether a replica fits on a node once groups have left it, and those of a minimum have moved.

    What stays elsewhere of each job stays in its place.
    """
    elsewhere = [[place for place in demand.held if place != node] for demand in jobs]
    choices = (
        set(itertools.combinations(sorted(places), min(demand.min, len(places))))
        for demand, places in zip(jobs, elsewhere, strict=True)
    )
    for staying in itertools.product(*choices):
        rest, moving = dict(room), []
        rest[node] -= size
        for demand, places in zip(jobs, staying, strict=True):
            for place in places:
                rest[place] -= int(demand.unit["CPU"])
            moving += [int(demand.unit["CPU"])] * (demand.min - len(places))
        rooms = tuple(sorted(rest.values(), reverse=True))
        if rooms[-1] >= 0 and packs(tuple(sorted(moving, reverse=True)), rooms):
            return True
    return False
