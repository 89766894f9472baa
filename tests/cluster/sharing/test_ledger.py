"""The ledger with a clock of the test's: promises, expiry, restarts, and many holders at once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from cluster.sharing.demand import Demand, Node
from cluster.sharing.ledger import Ledger


def nodes(*cpus: float) -> list[Node]:
    return [Node(f"n{index}", {"CPU": amount}) for index, amount in enumerate(cpus)]


def ledger_of(*cpus: float, priority: str = "serving", **options) -> Ledger:
    ledger = Ledger(priority, **options)
    ledger.update_nodes(nodes(*cpus))
    return ledger


def job(holder: str = "job", least: int = 1, most: int = 1, held=()) -> Demand:
    return Demand(holder, "training", {"CPU": 1}, least, most, tuple(held))


def app(holder: str = "app", least: int = 1, most: int = 1, held=()) -> Demand:
    return Demand(holder, "serving", {"CPU": 1}, least, most, tuple(held))


def test_a_grant_is_a_promise_before_anything_runs():
    ledger = ledger_of(2, 2)
    grant = ledger.request(job("a", 3, 3), now=0)
    assert grant.units == 3
    assert ledger.request(app("b", 2, 2), now=1).units == 0
    assert ledger.request(job("a", 3, 3), now=2) == grant


def test_a_promise_is_kept_while_only_a_part_of_it_runs_yet():
    ledger = ledger_of(2, 2)
    grant = ledger.request(job("a", 3, 3), now=0)
    assert ledger.request(job("a", 3, 3, held=grant.nodes[2:]), now=1).units == 3
    assert ledger.request(app("b", 1, 2), now=1).units == 1


def test_asking_for_less_gives_the_rest_back_at_once():
    ledger = ledger_of(4)
    assert ledger.request(app("a", 1, 4), now=0).units == 4
    assert ledger.request(app("a", 1, 2, held=["n0"]), now=1).units == 2
    assert ledger.request(job("b", 2, 2), now=1).units == 2


def test_a_job_that_asks_for_less_before_it_runs_frees_the_rest():
    ledger = ledger_of(4)
    assert ledger.request(job("a", 1, 4), now=0).units == 4
    assert ledger.request(job("a", 1, 1, held=["n0"]), now=1).units == 1
    assert ledger.request(app("b", 3, 3), now=1).units == 3


def test_which_unit_must_go_does_not_change_while_it_goes():
    ledger = ledger_of(1, 1)
    assert ledger.request(app("app", 1, 2), now=0).nodes == ("n0", "n1")
    ledger.request(job("job", 1, 1), now=1)
    for held in (["n0", "n1"], ["n1", "n0"], ["n1", "n0"]):
        assert ledger.request(app("app", 1, 2, held=held), now=2).nodes == ("n0",)


def test_a_lease_expires_when_its_holder_is_silent_and_not_before():
    ledger = ledger_of(1, ttl_s=15)
    ledger.request(job("a"), now=0)
    assert ledger.request(job("b"), now=15).units == 0
    assert ledger.request(job("b"), now=15.1).units == 1
    assert [row["holder"] for row in ledger.leases(now=15.2)] == ["b"]
    assert ledger.request(job("a"), now=16).units == 0


def test_release_frees_at_once():
    ledger = ledger_of(1)
    ledger.request(job("a"), now=0)
    ledger.release("a")
    ledger.release("never heard of")
    assert ledger.request(job("b"), now=0).units == 1


def test_what_gives_way_is_granted_only_when_its_holder_says_that_it_is_gone():
    ledger = ledger_of(2)
    grant = ledger.request(app("app", 1, 2), now=0)
    running = app("app", 1, 2, held=grant.nodes)
    ledger.request(running, now=1)
    assert ledger.request(job("job", 1, 1), now=2).units == 0
    assert ledger.request(running, now=3).units == 1
    assert ledger.request(job("job", 1, 1), now=4).units == 0, "the replica still drains"
    assert ledger.request(app("app", 1, 2, held=grant.nodes[:1]), now=5).units == 1
    assert ledger.request(job("job", 1, 1), now=6).units == 1


def test_a_promise_that_is_taken_back_stays_taken_until_its_holder_was_told():
    ledger = ledger_of(2)
    ledger.request(app("app", 1, 2), now=0)
    # Nothing of the app runs yet, but it may be starting: it was told two.
    assert ledger.request(job("job", 1, 1), now=1).units == 0
    assert ledger.request(app("app", 1, 2), now=2).units == 1
    assert ledger.request(job("job", 1, 1), now=3).units == 1


def test_units_that_run_elsewhere_than_granted_count_where_they_are():
    # The serving system placed both replicas on one node, although one each was granted.
    ledger = ledger_of(2, 2)
    ledger.request(job("early", 1, 1), now=0)
    first = ledger.request(app("app", 3, 3), now=0)
    assert Counter(first.nodes) == {"n0": 1, "n1": 2}
    ledger.release("early")
    assert ledger.request(app("app", 3, 3, held=["n0", "n0", "n1"]), now=1).units == 3
    assert ledger.request(job("job", 1, 1), now=2).nodes == ("n1",)


def test_a_promise_moves_when_someone_elses_unit_runs_in_its_place():
    ledger = ledger_of(1, 1)
    assert ledger.request(job("job", 1, 1), now=0).nodes == ("n0",)
    assert ledger.request(app("app", 1, 1), now=0).nodes == ("n1",)
    ledger.request(app("app", 1, 1, held=["n0"]), now=1)
    assert ledger.request(job("job", 1, 1), now=2).nodes == ("n1",)


def test_a_promise_of_the_tenant_with_priority_moves_too():
    ledger = ledger_of(1, 1, priority="serving")
    assert ledger.request(app("app", 1, 1), now=0).nodes == ("n0",)
    assert ledger.request(job("job", 1, 1), now=0).nodes == ("n1",)
    assert ledger.request(job("job", 1, 1, held=["n0"]), now=1).nodes == ("n0",)
    assert ledger.request(app("app", 1, 1), now=2).nodes == ("n1",)


def test_a_job_whose_node_died_is_completed_on_the_nodes_that_are_there():
    ledger = ledger_of(1, 1, 1)
    grant = ledger.request(job("job", 2, 2), now=0)
    assert set(grant.nodes) == {"n0", "n1"}
    ledger.update_nodes(nodes(1, 1, 1)[1:])
    assert ledger.request(job("job", 2, 2), now=1).nodes == ("n1", "n2")
    ledger.update_nodes(nodes(1, 1, 1)[2:])
    assert ledger.request(job("job", 2, 2), now=2).units == 0


def test_after_a_restart_those_who_run_are_heard_before_newcomers_are_granted_anything():
    ledger = ledger_of(2, closed_until=3.0)
    assert ledger.request(job("new", 1, 2), now=0).units == 0
    assert ledger.request(job("old", 1, 2, held=["n0"]), now=1).nodes == ("n0",)
    assert ledger.request(app("app", 1, 1, held=["n0"]), now=2).nodes == ("n0",)
    assert ledger.request(job("new", 1, 2), now=3.5).units == 0
    assert ledger.request(job("old", 1, 2, held=["n0"]), now=3.5).nodes == ("n0",)
    ledger.release("app")
    assert ledger.request(job("new", 1, 2), now=4).units == 1


def test_leases_tell_what_was_granted_and_what_is_wanted():
    ledger = ledger_of(2)
    ledger.request(job("b", 1, 5), now=0)
    ledger.request(app("a", 1, 1), now=0)
    assert ledger.leases(now=1) == [
        {"holder": "a", "kind": "serving", "min": 1, "max": 1, "granted": 0, "wants": 1, "nodes": []},
        {
            "holder": "b",
            "kind": "training",
            "min": 1,
            "max": 5,
            "granted": 2,
            "wants": 5,
            "nodes": ["n0", "n0"],
        },
    ]


class Holder:
    """A tenant as it should be: starts what it is granted after a while, ends what it no longer is."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.running: Counter[str] = Counter()
        self.ending: Counter[str] = Counter()
        self.granted: Counter[str] = Counter()
        self.heard = 0.0

    def beat(self, ledger: Ledger, now: float) -> None:
        held = (self.running + self.ending).elements()
        self.granted = Counter(ledger.request(replace(self.demand, held=tuple(held)), now).nodes)
        self.heard = now
        if self.demand.kind == "training" and self.granted.total() < self.demand.min:
            self.ending += self.running
            self.running.clear()
            return
        surplus = self.running - self.granted
        self.running -= surplus
        self.ending += surplus

    def work(self, rng: random.Random) -> None:
        """Some of the units that should start do, and some of those that should end do."""
        if self.granted.total() >= self.demand.min or self.demand.kind == "serving":
            missing = self.granted - self.running - self.ending
            self.running += Counter(node for node in missing.elements() if rng.random() < 0.5)
        self.ending -= Counter(node for node in self.ending.elements() if rng.random() < 0.3)


@pytest.mark.parametrize("seed", range(40))
def test_what_runs_never_exceeds_the_nodes_whatever_happens(seed):
    """Holders come, want more and less, start and end units late, go silent; nodes die and come."""
    rng = random.Random(seed)
    alive = nodes(*(rng.randint(1, 4) for _ in range(rng.randint(1, 4))))
    spare = [Node(f"m{index}", {"CPU": 2}) for index in range(50)]
    ledger = Ledger(rng.choice(["serving", "training"]), ttl_s=15)
    ledger.update_nodes(alive)
    holders: dict[str, Holder] = {}
    started = 0
    for step in range(300):
        now = step * 0.5
        if len(holders) < 5 and rng.random() < 0.3:
            least, kind = rng.randint(0, 3), rng.choice(["training", "serving"])
            unit = {"CPU": rng.choice([0.5, 1, 1, 2])}
            name = f"h{step}"
            holders[name] = Holder(Demand(name, kind, unit, least, least + rng.randint(0, 3)))
        for name, holder in list(holders.items()):
            chance = rng.random()
            if chance < 0.01:
                ledger.release(name)
                del holders[name]
            elif chance < 0.03:
                least = holder.demand.min
                holder.demand = replace(holder.demand, max=least + rng.randint(0, 3))
            elif chance < 0.6 or now - holder.heard > 10:
                holder.beat(ledger, now)
            holder.work(rng)
        if len(alive) > 1 and rng.random() < 0.01:
            dead = alive.pop(rng.randrange(len(alive)))
            alive.append(spare.pop())
            ledger.update_nodes(alive)
            for holder in holders.values():
                for units in (holder.running, holder.ending):
                    units.pop(dead.node_id, None)
        used: Counter[str] = Counter()
        for holder in holders.values():
            for node, count in (holder.running + holder.ending).items():
                used[node] += count * holder.demand.unit["CPU"]
            started += holder.running.total()
        room = {node.node_id: node.resources["CPU"] for node in alive}
        assert all(amount <= room[node] for node, amount in used.items() if node in room), (step, used, room)
    assert started > 0
    # Once nobody changes their mind, everyone settles: two rounds of heartbeats grant the same.
    for step in range(300, 340):
        for holder in holders.values():
            holder.beat(ledger, step * 0.5)
            holder.ending.clear()
            holder.running = Counter(holder.granted)
    before = {name: holder.granted for name, holder in holders.items()}
    for holder in holders.values():
        holder.beat(ledger, 170.5)
    assert {name: holder.granted for name, holder in holders.items()} == before
