"""The ledger under random tenants: some follow what they are told, some lag, some die; nodes come and go.

What runs is counted by the tenants of the test, not by the ledger.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cluster.sharing.allocate import allocate
from cluster.sharing.audit import granted_twice
from cluster.sharing.demand import Demand, Grant, Node
from cluster.sharing.ledger import Ledger

Gang = tuple[str, ...]

TTL_S, PATIENCE_S, SETTLE_S = 15.0, 20.0, 4.0


@dataclass
class Tenant:
    """Starts the gangs that it was told when it gets to it, ends what it was told to end; later or never."""

    demand: Demand
    running: list[Gang] = field(default_factory=list)
    ending: list[Gang] = field(default_factory=list)
    told: list[Gang] = field(default_factory=list)

    @property
    def held(self) -> list[Gang]:
        return [*self.running, *self.ending]

    def beat(self, ledger: Ledger, now: float) -> Grant:
        held = tuple(node for gang in self.held for node in gang)
        grant = ledger.request(replace(self.demand, held=held), now)
        size = self.demand.gang
        assert len(grant.nodes) % size == 0, "a part of a gang was granted"
        self.told = [grant.nodes[first : first + size] for first in range(0, grant.units, size)]
        # It obeys at once; how long units take to end is another matter.
        told = Counter(map(_places, self.told))
        for gang in list(self.running):
            if told[_places(gang)]:
                told[_places(gang)] -= 1
            else:
                self.running.remove(gang)
                self.ending.append(gang)
        return grant

    def start(self, most: int) -> None:
        """Start gangs that were told, where no gang of its own is still ending."""
        missing = Counter(map(_places, self.told)) - Counter(map(_places, self.running))
        free = [gang for gang in missing.elements() if not any(set(gang) & set(old) for old in self.ending)]
        self.running += free[:most]


def _places(gang: Gang) -> Gang:
    return tuple(sorted(gang))


class Tenants(RuleBasedStateMachine):
    """Invariants: what runs, and what is granted, fits the nodes at every moment; gangs are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.ledger = Ledger("serving", ttl_s=TTL_S, patience_s=PATIENCE_S, settle_s=SETTLE_S)
        self.nodes = {"a": 2, "b": 3, "c": 1}
        self.hidden: set[str] = set()
        self.avoided: set[str] = set()
        self.tenants: dict[str, Tenant] = {}
        self.log: list[dict] = []
        self.say_nodes()

    holders = Bundle("holders")

    def say_nodes(self) -> None:
        seen = {each: cpus for each, cpus in sorted(self.nodes.items()) if each not in self.hidden}
        self.ledger.update_nodes([self.node(each, cpus) for each, cpus in seen.items()])

    def node(self, name: str, cpus: float) -> Node:
        return Node(name, {"CPU": cpus}, name=name[0], avoided=name in self.avoided)

    @rule(
        target=holders,
        kind=st.sampled_from(["training", "training", "serving"]),
        gang=st.sampled_from([1, 1, 2, 3]),
        least=st.integers(0, 2),
        more=st.integers(0, 3),
        cpus=st.sampled_from([1, 1, 2, 0.5]),
        priority=st.sampled_from([0, 0, 1]),
        rebuilds=st.booleans(),
    )
    def comes(self, kind, gang, least, more, cpus, priority, rebuilds):
        gang = 1 if kind == "serving" else gang
        name = f"{kind[0]}{self.count}"
        self.count += 1
        numbers = (least * gang, (least + more) * gang)
        rebuilds = rebuilds and kind == "training" and gang == 1
        demand = Demand(name, kind, {"CPU": cpus}, *numbers, gang=gang, priority=priority, rebuilds=rebuilds)
        self.tenants[name] = Tenant(demand)
        return name

    @rule(name=holders, starts=st.integers(0, 3), ends=st.integers(0, 3))
    def beats(self, name, starts, ends):
        """It says what it holds, is told, and starts and ends some of it."""
        tenant = self.tenants[name]
        del tenant.ending[:ends]
        tenant.beat(self.ledger, self.now)
        tenant.start(starts)

    @rule(name=holders, ends=st.integers(1, 3))
    def ends_units(self, name, ends):
        del self.tenants[name].ending[:ends]

    @rule(name=holders, more=st.integers(0, 3))
    def wants_another_number(self, name, more):
        tenant = self.tenants[name]
        demand = tenant.demand
        tenant.demand = replace(demand, max=demand.min + more * demand.gang)

    @rule(name=consumes(holders))
    def leaves(self, name):
        self.ledger.release(name)
        del self.tenants[name]

    @rule(name=consumes(holders))
    def dies_silently(self, name):
        """Its units die with it; nobody tells the ledger."""
        del self.tenants[name]

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def time_passes(self, seconds):
        self.now += seconds
        for tenant in self.tenants.values():  # those that live are heard often enough
            tenant.beat(self.ledger, self.now)

    @rule(data=st.data())
    def node_dies(self, data):
        """What ran there is dead, and its holder sees it; a gang that lost a unit is at its end."""
        dead = data.draw(st.sampled_from(sorted(self.nodes)))
        if len(self.nodes) == 1:
            return
        del self.nodes[dead]
        self.hidden.discard(dead)
        self.say_nodes()
        for tenant in self.tenants.values():
            for gang in [gang for gang in tenant.running if dead in gang]:
                tenant.running.remove(gang)
                tenant.ending.append(gang)
            tenant.ending = [gang for gang in tenant.ending if set(gang) & self.nodes.keys()]

    @rule(name=st.sampled_from("abc"), cpus=st.integers(1, 4))
    def node_comes(self, name, cpus):
        """A node of the name of one that died, or of a new one; its id is new."""
        if len(self.nodes) < 3 and name not in {each[0] for each in self.nodes}:
            self.count += 1
            self.nodes[f"{name}{self.count}"] = cpus
            self.say_nodes()

    @rule(data=st.data())
    def node_is_silent_or_answers_again(self, data):
        """What runs on a node that does not answer goes on, unless its holder is told otherwise."""
        self.hidden ^= {data.draw(st.sampled_from(sorted(self.nodes)))}
        self.say_nodes()

    @rule(data=st.data())
    def node_is_avoided_or_trusted_again(self, data):
        self.avoided ^= {data.draw(st.sampled_from(sorted(self.nodes)))}
        self.say_nodes()

    @rule(name=holders, data=st.data())
    def a_gang_fails(self, name, data):
        """It is gone at once, its nodes are avoided for it, and its holder says so with its next word."""
        tenant = self.tenants[name]
        tenant.start(1)
        tenant.beat(self.ledger, self.now)
        if tenant.running:
            gang = tenant.running.pop(data.draw(st.integers(0, len(tenant.running) - 1)))
            self.avoided |= set(gang)
            self.say_nodes()
            tenant.beat(self.ledger, self.now)

    @invariant()
    def what_runs_fits_the_nodes(self):
        used: Counter[str] = Counter()
        for tenant in self.tenants.values():
            for gang in tenant.held:
                for node in gang:
                    used[node] += tenant.demand.unit["CPU"]
        assert all(used[name] <= cpus for name, cpus in self.nodes.items()), (used, self.nodes)

    @invariant()
    def the_log_shows_no_device_granted_twice(self):
        self.log += [event.as_json() for event in self.ledger.take_events()]
        assert granted_twice(self.log) == []

    def teardown(self):
        """Once nobody changes their mind, all get what the allocation would give them for good."""
        self.hidden.clear()
        self.say_nodes()
        for _ in range(12):
            self.now += SETTLE_S + 0.5
            for tenant in self.tenants.values():
                tenant.beat(self.ledger, self.now)
                tenant.ending.clear()
                tenant.start(99)
            self.the_log_shows_no_device_granted_twice()
            self.what_runs_fits_the_nodes()
        demands = []
        for tenant in self.tenants.values():
            assert sorted(map(_places, tenant.told)) == sorted(map(_places, tenant.running))
            held = tuple(node for gang in tenant.told for node in gang)
            demands.append(replace(tenant.demand, held=held))
        snapshot = self.ledger.snapshot(self.now)
        nodes = [replace(self.node(name, cpus), name="") for name, cpus in self.nodes.items()]
        grants = allocate(nodes, demands, "serving", since=snapshot.since, overdue=snapshot.overdue)
        assert {name: Counter(grant.nodes) for name, grant in grants.items()} == {
            demand.holder: Counter(demand.held) for demand in demands
        }


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
