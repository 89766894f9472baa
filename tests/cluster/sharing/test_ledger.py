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


def test_what_a_holder_would_be_told_is_known_before_it_asks():
    ledger = ledger_of(2)
    assert ledger.would_tell("job", 0.0) is None
    first = ledger.request(job(most=2), 0.0)
    assert ledger.would_tell("job", 0.0).nodes == first.nodes
    seen = ledger.changes
    ledger.request(job(most=2), 1.0)
    assert ledger.changes == seen, "nothing is new to anybody"
    ledger.request(job(most=2, held=first.nodes), 1.0)
    waiting = ledger.request(app(), 2.0)
    assert ledger.changes > seen
    assert (waiting.nodes, waiting.coming) == ((), ("n0",))
    left = ledger.would_tell("job", 2.0)
    assert left.nodes == ("n0",)
    assert ledger.request(job(most=2, held=first.nodes), 2.0).nodes == left.nodes
    assert ledger.would_tell("app", 2.0).nodes == ()
    ledger.request(job(most=2, held=left.nodes), 3.0)
    assert ledger.would_tell("app", 3.0).nodes == ("n0",)


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


def gangs(grant_nodes: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    return [tuple(sorted(grant_nodes[first : first + size])) for first in range(0, len(grant_nodes), size)]


def group(holder: str, least: int, most: int, held=(), size: int = 2) -> Demand:
    return Demand(holder, "training", {"CPU": 1}, least, most, tuple(held), gang=size)


def test_gangs_are_matched_whole_in_whatever_order_their_holder_names_them():
    ledger = ledger_of(2, 2, 2)
    grant = ledger.request(group("job", 2, 6), now=0)
    assert len(gangs(grant.nodes, 2)) == 3
    assert all(gang[0] == gang[1] for gang in gangs(grant.nodes, 2))
    held = ["n2", "n2", "n0", "n0"]
    assert Counter(ledger.request(group("job", 2, 6, held), now=1).nodes) == Counter(grant.nodes)
    assert ledger.request(app("app", 1, 1), now=1).units == 0, "the third group is promised"


def test_a_gang_that_lost_a_node_keeps_its_place_while_it_is_completed_elsewhere():
    ledger = ledger_of(1, 1, 1)
    assert ledger.request(group("job", 2, 2), now=0).nodes == ("n0", "n1")
    ledger.update_nodes(nodes(1, 1, 1)[1:])
    for _ in range(3):  # its holder has not started it anew yet
        grant = ledger.request(group("job", 2, 2, ["n0", "n1"]), now=1)
        assert sorted(grant.nodes) == ["n1", "n2"]
    assert ledger.request(app("app", 1, 1), now=2).units == 0, "its new place is promised"
    assert ledger.request(group("job", 2, 2, ["n2", "n1"]), now=3).units == 2


def test_a_group_that_was_told_to_go_keeps_its_place_until_it_is_gone_and_is_not_called_back():
    ledger = ledger_of(2, settle_s=0)
    grant = ledger.request(job("job", 1, 2), now=0)
    ledger.request(app("app", 1, 1), now=1)
    assert ledger.request(job("job", 1, 2, grant.nodes), now=2).units == 1
    ledger.release("app")
    assert ledger.request(job("job", 1, 2, grant.nodes), now=3).units == 1, "it may have said goodbye"
    assert ledger.request(app("late", 0, 1), now=4).units == 0
    assert ledger.request(job("job", 1, 2, grant.nodes[:1]), now=5).units == 1, "serving wants go first"
    assert ledger.request(app("late", 0, 1), now=6).units == 1


def test_serving_is_told_no_new_place_while_a_replica_has_to_leave():
    # By the number alone it would not know that one has to.
    ledger = ledger_of(2, 1)
    assert ledger.request(app("app", 0, 1), now=0).nodes == ("n1",)
    ledger.update_nodes([Node("n0", {"CPU": 2}), Node("n1", {"CPU": 1, "GPU": 1})])
    wants_gpu = Demand("gpu", "training", {"CPU": 1, "GPU": 1}, 1, 1)
    ledger.request(wants_gpu, now=1)
    assert ledger.request(app("app", 0, 1, ["n1"]), now=2).units == 0
    assert ledger.request(app("app", 0, 1), now=3).nodes == ("n0",)
    assert ledger.request(wants_gpu, now=4).nodes == ("n1",)


def test_a_minimum_that_waited_too_long_has_nodes_kept_clear_for_it():
    ledger = ledger_of(2, 2, patience_s=30)
    ledger.request(job("a"), now=0)
    ledger.request(job("b"), now=0)
    ledger.request(job("c"), now=0)
    large = Demand("large", "training", {"CPU": 2}, 2, 2, gang=2)
    held = {"a": ["n0"], "b": ["n0"], "c": ["n1"]}

    def beat(now: float) -> None:
        for holder, place in held.items():
            ledger.request(job(holder, held=place), now)

    assert ledger.request(large, now=1).units == 0
    beat(10)
    assert ledger.request(large, now=10).units == 0
    assert ledger.request(job("small"), now=11).units == 1, "it may go first while nobody waits too long"
    ledger.release("small")
    beat(20)
    assert ledger.request(large, now=20).units == 0
    beat(31)
    assert ledger.request(large, now=31).units == 0
    assert ledger.request(job("small"), now=32).units == 0
    assert [event.cause for event in ledger.take_events()].count("overdue") == 1
    for holder in held:
        ledger.release(holder)
    assert ledger.request(large, now=33).units == 2


def test_what_a_job_has_changes_for_the_sake_of_wants_only_now_and_then():
    ledger = ledger_of(4, settle_s=10)
    ledger.request(app("app", 3, 3), now=0)
    grant = ledger.request(job("job", 1, 4), now=0)
    assert grant.units == 1
    ledger.release("app")
    assert ledger.request(job("job", 1, 4, grant.nodes), now=5).units == 1, "its first grant is 5 s old"
    assert ledger.request(job("job", 1, 4, grant.nodes), now=10).units == 4


def test_serving_and_minimums_are_not_held_up_by_a_job_that_settles():
    ledger = ledger_of(4, settle_s=100)
    held = ledger.request(job("job", 1, 4), now=0).nodes
    ledger.request(app("app", 1, 2), now=1)
    held = ledger.request(job("job", 1, 4, held), now=2).nodes
    assert len(held) == 2
    ledger.request(job("job", 1, 4, held), now=3)
    assert ledger.request(app("app", 1, 2), now=4).units == 2
    ledger.request(job("late", 1, 1), now=5)
    assert ledger.request(job("job", 1, 4, held), now=6).units == 1


def test_what_a_node_took_with_it_is_replaced_at_once():
    ledger = ledger_of(1, 1, 1, settle_s=10)
    ledger.request(app("app", 1, 1), now=0)
    held = ledger.request(job("job", 1, 2), now=0).nodes
    assert held == ("n1", "n2")
    ledger.request(app("app", 1, 1, ["n0"]), now=5)
    ledger.request(job("job", 1, 2, held), now=5)
    ledger.update_nodes(nodes(1, 1, 1)[:2])
    ledger.request(app("app", 1, 1, ["n0"]), now=11)
    assert ledger.request(job("job", 1, 2, held), now=11).nodes == ("n1",)
    ledger.release("app")
    assert ledger.request(job("job", 1, 2, ["n1"]), now=12).nodes == ("n1", "n0"), "the loss is no change"
    ledger.update_nodes(nodes(1, 1, 1)[1:2])
    ledger.request(job("job", 2, 2, ["n1", "n0"]), now=13)
    ledger.update_nodes(nodes(1, 1, 1)[1:])
    assert ledger.request(job("job", 2, 2, ["n1"]), now=14).units == 2, "a minimum is never held up"


def causes(ledger: Ledger) -> list[tuple[str, str | None]]:
    return [(event.cause, event.holder or event.node) for event in ledger.take_events()]


def test_units_that_start_are_told_from_those_that_run():
    ledger = ledger_of(2, 2)
    held = ledger.request(job("job", 1, 4), now=0).nodes
    ledger.take_events()
    for now, starting, reason in (
        (1, held, "of job, 4 workers start on n0 (2) and n1 (2)"),
        (2, held[:1], "of job, 3 workers run on n0 (1) and n1 (2)"),
        (3, (), "of job, 1 worker runs on n0"),
    ):
        ledger.request(replace(job("job", 1, 4, held), starting=tuple(starting)), now=now)
        (event,) = ledger.take_events()
        assert (event.cause, event.reason) == ("held", reason)
        assert event.held == {"n0": 2, "n1": 2}
        assert sum(event.starting.values()) == len(starting)
    ledger.request(job("job", 1, 4, held), now=4)
    assert ledger.take_events() == []


def test_every_change_is_an_event_with_its_cause():
    ledger = ledger_of(2, 2)
    assert causes(ledger) == [("node_joined", "n0"), ("node_joined", "n1")]
    held = ledger.request(job("job", 1, 4), now=0).nodes
    assert causes(ledger) == [("started", "job")]
    ledger.request(job("job", 1, 4, held), now=1)
    assert causes(ledger) == [("held", "job")]
    ledger.request(app("app", 2, 2), now=2)
    assert causes(ledger) == [("waiting", "app")]
    fewer = ledger.request(job("job", 1, 4, held), now=3).nodes
    (event,) = ledger.take_events()
    assert (event.cause, event.by) == ("gave_way", ("app",))
    assert event.reason == "job gave way to app: 2 workers leave n1; it has 2 of at most 4 workers"
    assert (event.before, event.after, event.held) == ({"n0": 2, "n1": 2}, {"n0": 2}, {"n0": 2, "n1": 2})
    ledger.request(job("job", 1, 4, fewer), now=4)
    ledger.request(app("app", 2, 2), now=5)
    assert causes(ledger) == [("held", "job"), ("started", "app")]
    ledger.request(app("app", 1, 1, ["n1"]), now=6)
    assert causes(ledger) == [("asked_less", "app"), ("handed_over", "app")]
    ledger.request(job("job", 1, 4, fewer), now=14)
    assert causes(ledger) == [("grew", "job")]
    ledger.update_nodes(nodes(2, 2)[:1])
    ledger.request(job("job", 1, 4, (*fewer, "n1")), now=15)
    assert causes(ledger) == [("node_gone", "n1"), ("node_gone", "job")]
    ledger.update_nodes(nodes(2, 2))
    ledger.release("app")
    ledger.expire(now=100)
    assert causes(ledger) == [("node_back", "n1"), ("released", "app"), ("expired", "job")]
    ledger.request(job("old", 1, 1, ["n0"]), now=101)
    assert causes(ledger) == [("found", "old")]


def test_what_strangers_use_is_not_granted_and_is_an_event():
    ledger = ledger_of(2)
    ledger.take_events()
    ledger.update_nodes(nodes(2), {"n0": {"CPU": 1}})
    (event,) = ledger.take_events()
    assert (event.cause, event.resources, event.foreign) == ("foreign_use", {"CPU": 2}, {"CPU": 1})
    assert event.reason == "strangers use 1 CPU of the 2 CPU of n0"
    assert ledger.request(job("job", 1, 2), now=0).units == 1
    ledger.update_nodes(nodes(2))
    assert ledger.take_events()[-1].reason == "strangers use nothing of the 2 CPU of n0"


def test_nobody_loses_a_unit_because_it_was_taken_for_a_strangers():
    # The broker was restarted, and a holder was heard so late that its units counted as a stranger's.
    ledger = ledger_of(2)
    ledger.update_nodes(nodes(2), {"n0": {"CPU": 2}})
    assert ledger.request(job("new"), now=0).units == 0
    assert ledger.request(job("old", 2, 3, ["n0", "n0"]), now=1).nodes == ("n0", "n0")


def test_what_runs_on_a_node_that_was_only_silent_goes_on():
    ledger = ledger_of(1, 1)
    assert ledger.request(group("job", 2, 2), now=0).nodes == ("n0", "n1")
    ledger.request(app("waits", 1, 1), now=1)
    ledger.update_nodes(nodes(1))
    assert ledger.request(group("job", 2, 2, ["n0", "n1"]), now=2).units == 0
    assert ledger.request(app("waits", 1, 1), now=2).units == 0, "the rest of the group runs still"
    ledger.update_nodes(nodes(1, 1))
    assert ledger.request(group("job", 2, 2, ["n0", "n1"]), now=3).units == 2


def test_a_gang_that_is_whole_again_needs_none_in_its_stead():
    ledger = ledger_of(1, 1, 1)
    assert ledger.request(group("job", 2, 2), now=0).nodes == ("n0", "n1")
    ledger.update_nodes(nodes(1, 1, 1)[1:])
    assert sorted(ledger.request(group("job", 2, 2, ["n0", "n1"]), now=1).nodes) == ["n1", "n2"]
    ledger.update_nodes(nodes(1, 1, 1))
    assert sorted(ledger.request(group("job", 2, 2, ["n0", "n1"]), now=2).nodes) == ["n0", "n1"]
    assert ledger.request(app("app", 1, 1), now=3).nodes == ("n2",)


def test_the_only_group_that_steps_is_not_taken_while_another_one_starts():
    ledger = ledger_of(1, 1)
    first = ledger.request(job("job", 1, 1), now=0).nodes
    held = ledger.request(job("job", 1, 2, first), now=20).nodes
    assert held == ("n0", "n1")
    starting = replace(job("job", 1, 2, held), starting=("n1",))
    ledger.request(starting, now=21)
    ledger.request(app("app", 1, 1), now=22)
    assert ledger.request(starting, now=23).nodes == ("n0",)
    other = ledger_of(1, 1)
    other.request(job("job", 1, 2, held), now=0)
    starting = replace(job("job", 1, 2, held), starting=("n0",))
    other.request(starting, now=1)
    other.request(app("app", 1, 1), now=2)
    assert other.request(starting, now=3).nodes == ("n1",), "whichever it is"


def test_a_preview_is_what_would_be_granted_and_changes_nothing():
    ledger = ledger_of(2, 2)
    held = ledger.request(app("app", 1, 3), now=0).nodes
    ledger.request(app("app", 1, 3, held), now=1)
    ledger.take_events()
    seen = ledger.preview(job("job", 1, 4), now=2)
    assert seen is not None
    assert seen.units == 1
    assert ledger.preview(job("job", 2, 4), now=2).coming  # type: ignore[union-attr]
    assert ledger.take_events() == []
    assert [row["holder"] for row in ledger.leases(2)] == ["app"]
    assert ledger.request(job("job", 1, 4), now=2) == seen
    assert ledger.preview(job("job", 1, 4), now=2) is None, "it has a lease"


def test_a_ledger_that_hears_who_runs_previews_nothing():
    ledger = ledger_of(2, closed_until=5.0)
    assert ledger.preview(job("job", 1, 1), now=1) is None
    assert ledger.preview(job("job", 1, 1), now=6) is not None
