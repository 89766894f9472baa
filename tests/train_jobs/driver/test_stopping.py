"""Groups that have to leave or to stop: how long they are waited for, on devices that stay theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from cluster.sharing.demand import Grant
from train_jobs.driver import replica_groups, single_group
from train_jobs.driver.departure import WORD_S, Departure
from train_jobs.driver.job_lease import RENEW_S
from train_jobs.driver.replica_groups import ReplicaGroups
from train_jobs.driver.single_group import SingleGroup
from train_jobs.elastic.membership import NO_STATE, View
from train_jobs.group.outcome import GroupOutcome
from train_jobs.group.standing_by import StandingBy
from train_jobs.records import control
from train_jobs.records.control import SAVES_FOR_S, JobControl
from train_jobs.spec import GroupSpec

GRACE_S = 5.0
LEASE_S = 15.0
OTHER_NODES = ("n3", "n4")


@dataclass
class Clock:
    """The time of everybody, which passes while somebody waits."""

    now: float = 1000.0
    plans: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Let something happen so many seconds from the start."""
        self.plans.append((1000.0 + when, do))

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        for plan in [each for each in self.plans if each[0] <= self.now]:
            self.plans.remove(plan)
            plan[1]()
        assert self.now < 2000.0, "it never ends"


class FakeGroup:
    """A group whose ranks do what a test lets them do."""

    made: list[FakeGroup]

    def __init__(self, agents: Any) -> None:
        self.spec: GroupSpec
        self.ended = self
        self.gone = False
        self.end: GroupOutcome | None = None
        self.killed_at: float | None = None
        self.specs: list[str] = []
        """The names of all that it was."""

    def start(self, spec: GroupSpec, own: Storage, *, wait_s: float = 0.0) -> None:
        self.spec, self.end = spec, None
        self.specs.append(spec.name)
        if self not in self.made:
            self.made.append(self)

    def outcome(self) -> GroupOutcome:
        assert self.end is not None
        return self.end

    def ends(self, status: str) -> None:
        self.end = self.end or GroupOutcome(status)

    def rest(self) -> bool:
        return self.killed_at is None

    def take_down(self) -> None:
        self.killed_at = self.killed_at or CLOCK.now
        self.ends("failed")

    def kill(self) -> None:
        if hasattr(self, "spec") and self.end is None:
            self.take_down()
        self.gone = True


CLOCK = Clock()


class FakeJob:
    """What the driver is for those who run the groups, with the control that it really has."""

    def __init__(self, directory: Path) -> None:
        self.actor = JobControl(str(directory / "run"))
        self.control: Any = SimpleNamespace(
            **{name: SimpleNamespace(remote=getattr(self.actor, name)) for name in ("begin", "stop", "go_on")}
        )
        self.stops = False
        self.started = True
        self.events: list[str] = []

    def spec_for(self, grant: Grant, attempt: int) -> GroupSpec:
        return GroupSpec("lm-1", TrainJobConfig(), "run", attempt, 0, grant.nodes)

    def group_at(self, index: int, units: Sequence[str]) -> GroupSpec:
        return GroupSpec("lm-1", TrainJobConfig(), "run", 1, index, tuple(units))

    def judge(self, spec: GroupSpec, outcome: GroupOutcome, in_vain: int) -> float:
        raise AssertionError("nothing has failed")

    def event(self, kind: str, **facts: Any) -> None:
        self.events.append(kind)

    def has_started(self, attempt: int) -> bool:
        return self.started

    def is_saving(self, group: str) -> bool:
        return self.actor.is_saving(group)

    def ask_to_stop(self) -> bool:
        return self.stops


class FakeLease:
    """Says what is granted; whoever does not renew it for too long has lost it."""

    unit_size = least = units = 1
    news = ()

    def __init__(self, nodes: Sequence[str]) -> None:
        self.grant = Grant("job/lm-1", tuple(nodes))
        self.renewed_at = CLOCK.now

    def renew(self, held: Sequence[str], starting: Sequence[str] = ()) -> Grant:
        assert CLOCK.now - self.renewed_at < LEASE_S, "the lease ran out, and somebody else has the devices"
        self.renewed_at = CLOCK.now
        return self.grant


class FakeAgents:
    def reports(self, spec: GroupSpec) -> Any:
        return SimpleNamespace(calls=[], errors=[], take=lambda: None)

    def ready(self, nodes: Sequence[str]) -> bool:
        return True

    def only(self, nodes: object) -> None: ...


class FakeLighthouse:
    """All groups but the newcomers step together."""

    newcomers: frozenset[str] = frozenset()
    expected: Sequence[str] = ()

    def __init__(self, job: str, attempt: int) -> None: ...

    def expect(self, groups: Sequence[str]) -> None:
        FakeLighthouse.expected = groups

    def view(self) -> View | None:
        names = [each.spec.name for each in FakeGroup.made if each.spec.name not in self.newcomers]
        return View(1, tuple(names), (NO_STATE,) * len(names))

    def leave(self, group: str) -> None: ...

    def ended(self, group: str) -> None: ...


def first_ended(
    groups: Sequence[FakeGroup], timeout_s: float, news: Sequence[object] = ()
) -> FakeGroup | None:
    found = [each for each in groups if each.end is not None]
    if not found:
        CLOCK.pass_(timeout_s)
    return found[0] if found else None


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray, no processes, and a clock of the test's own."""
    monkeypatch.setattr(FakeGroup, "made", [], raising=False)
    monkeypatch.setattr(FakeLighthouse, "newcomers", frozenset())
    monkeypatch.setattr(FakeLighthouse, "expected", ())
    CLOCK.now, CLOCK.plans = 1000.0, []
    for module in (replica_groups, single_group):
        monkeypatch.setattr(module, "Group", FakeGroup)
        monkeypatch.setattr(module, "first_ended", first_ended)
        monkeypatch.setattr(module, "alive_nodes", lambda: {"n1", "n2", *OTHER_NODES})
        monkeypatch.setattr(module, "time", CLOCK)
    monkeypatch.setattr(control, "time", CLOCK)
    ray = SimpleNamespace(wait=lambda refs, timeout: CLOCK.pass_(timeout), kill=lambda actor: None)
    monkeypatch.setattr(single_group, "ray", ray)
    monkeypatch.setattr(replica_groups, "ray", ray)
    monkeypatch.setattr(replica_groups, "start_lighthouse", lambda *_: None)
    monkeypatch.setattr(replica_groups, "LighthouseClient", FakeLighthouse)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    made = FakeJob(tmp_path)
    yield made
    made.actor.log.close()


Run = Callable[[FakeJob, FakeLease], GroupOutcome]


def as_one_group(job: FakeJob, lease: FakeLease) -> GroupOutcome:
    own = cast(Any, None)
    single = SingleGroup(job, cast(Any, lease), own, cast(Any, FakeAgents()), grace_s=GRACE_S)
    return single.run(lease.grant, 1)[1]


def as_replica_groups(job: FakeJob, lease: FakeLease, standing_by: StandingBy | None = None) -> GroupOutcome:
    groups = ReplicaGroups(
        job,
        cast(Any, lease),
        "lm-1",
        own=cast(Any, None),
        agents=cast(Any, FakeAgents()),
        grace_s=GRACE_S,
        heartbeat_timeout_s=2.0,
        standing_by=standing_by or StandingBy(),
    )
    return groups.run(lease.grant)[1]


both = pytest.mark.parametrize("run", [as_one_group, as_replica_groups])


def saves(job: FakeJob, begin: float, end: float, *, late_s: float = 0.0) -> None:
    """Let the first group say twice a second that it saves, each word being on its way for so long."""
    moment = begin
    while moment < end:
        CLOCK.at(moment + late_s, lambda: job.actor.saves("1-0"))
        moment += SAVES_FOR_S / 4


def reclaimed(lease: FakeLease) -> None:
    """The first group has to make way, at the start."""
    lease.grant = Grant("job/lm-1", OTHER_NODES, gave_way_to=("job/other",))


def first_group() -> FakeGroup:
    return FakeGroup.made[0]


def run_reclaimed(run: Run, job: FakeJob) -> FakeGroup:
    """The first group, which has lost its devices at the start, when all are gone."""
    lease = FakeLease(["n1", "n2"])
    CLOCK.at(RENEW_S, lambda: reclaimed(lease))

    def the_others_end() -> None:
        for each in FakeGroup.made[1:]:
            each.ends("finished")

    CLOCK.at(300.0, the_others_end)
    run(job, lease)
    return first_group()


@both
def test_a_group_that_does_not_leave_is_taken_down_after_its_grace(run: Run, job: FakeJob) -> None:
    group = run_reclaimed(run, job)
    assert group.killed_at is not None
    assert GRACE_S <= group.killed_at - 1000.0 <= GRACE_S + WORD_S + 4 * RENEW_S


@both
@pytest.mark.parametrize("begins", [2.0, GRACE_S - 0.2, GRACE_S + 0.4])
def test_a_group_that_saves_leaves_when_it_has_saved(run: Run, job: FakeJob, begins: float) -> None:
    """Also where it began when its time was nearly over, and its word came only when it was."""
    saves(job, begins, 60.0, late_s=1.5)
    CLOCK.at(61.0, lambda: first_group().ends("left" if run is as_replica_groups else "stopped"))
    assert run_reclaimed(run, job).killed_at is None


@both
def test_a_group_that_stays_when_it_has_saved_is_taken_down(run: Run, job: FakeJob) -> None:
    saves(job, 2.0, 60.0)
    group = run_reclaimed(run, job)
    assert group.killed_at is not None
    assert 60.0 <= group.killed_at - 1000.0 <= 60.0 + SAVES_FOR_S + WORD_S + 4 * RENEW_S


def test_a_departure_is_late_only_when_no_word_of_a_save_can_be_on_its_way() -> None:
    saving = False
    departure = Departure(100.0, lambda: saving)
    assert [departure.is_late(now) for now in (0.0, 99.9, 100.0, 100.0 + 0.9 * WORD_S)] == [False] * 4
    saving = True
    assert not departure.is_late(103.0)
    saving = False
    assert [departure.is_late(now) for now in (500.0, 500.0 + WORD_S)] == [False, True]


@both
def test_the_devices_stay_those_of_a_job_that_stops_for_longer_than_a_lease_lives(
    run: Run, job: FakeJob
) -> None:
    lease = FakeLease(["n1", "n2"])
    CLOCK.at(2.0, lambda: setattr(job, "stops", True))
    CLOCK.at(2.0 + 3 * LEASE_S, lambda: [each.ends("stopped") for each in FakeGroup.made])
    assert run(job, lease).status == "stopped"
    assert [each.killed_at for each in FakeGroup.made] == [None] * len(FakeGroup.made)
    assert CLOCK.now - lease.renewed_at < 4 * RENEW_S


@both
def test_a_stop_while_the_ranks_start_ends_them_at_once(run: Run, job: FakeJob) -> None:
    job.started = False
    CLOCK.at(2.0, lambda: setattr(job, "stops", True))
    run(job, FakeLease(["n1", "n2"]))
    for each in FakeGroup.made:
        assert each.killed_at is not None
        assert each.killed_at - 1000.0 <= 2.0 + 4 * RENEW_S


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_lighthouse_that_stands_by_is_told_whom_to_wait_for(job: FakeJob, attempt: int) -> None:
    standing_by = StandingBy()
    standing_by.lighthouses[attempt] = object()
    CLOCK.at(2.0, lambda: setattr(job, "stops", True))
    CLOCK.at(3.0, lambda: [each.ends("stopped") for each in FakeGroup.made])
    as_replica_groups(job, FakeLease(["n1", "n2"]), standing_by)
    assert list(FakeLighthouse.expected) == (["1-0", "1-1"] if attempt == 1 else [])


def test_a_stop_ends_groups_that_have_yet_to_join_and_lets_the_others_save(job: FakeJob) -> None:
    FakeLighthouse.newcomers = frozenset({"1-1"})
    CLOCK.at(2.0, lambda: setattr(job, "stops", True))
    CLOCK.at(20.0, lambda: first_group().ends("stopped"))
    assert as_replica_groups(job, FakeLease(["n1", "n2"])).status == "stopped"
    first, newcomer = FakeGroup.made
    assert first.killed_at is None
    assert newcomer.killed_at is not None
    assert newcomer.killed_at - 1000.0 <= 2.0 + 4 * RENEW_S


def test_what_has_started_a_group_starts_the_next_one_on_its_node_and_is_gone_in_the_end(
    job: FakeJob,
) -> None:
    lease = FakeLease(["n1", "n2"])
    fewer, all_again = Grant("job/lm-1", ("n1",)), lease.grant
    CLOCK.at(2.0, lambda: setattr(lease, "grant", fewer))
    CLOCK.at(4.0, lambda: FakeGroup.made[1].ends("left"))
    CLOCK.at(8.0, lambda: setattr(lease, "grant", all_again))
    CLOCK.at(12.0, lambda: setattr(lease, "grant", fewer))
    CLOCK.at(14.0, lambda: FakeGroup.made[1].ends("left"))
    CLOCK.at(20.0, lambda: first_group().ends("finished"))
    assert as_replica_groups(job, lease).status == "finished"
    first, second = FakeGroup.made
    assert (first.specs, second.specs) == (["1-0"], ["1-1", "1-2"])
    assert first.gone
    assert second.gone


def test_what_has_started_a_group_is_not_kept_for_a_node_that_is_gone(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, there = FakeLease(["n1", "n2"]), {"n1", "n2"}
    monkeypatch.setattr(replica_groups, "alive_nodes", lambda: set(there))
    CLOCK.at(2.0, lambda: setattr(lease, "grant", Grant("job/lm-1", ("n1",))))
    CLOCK.at(4.0, lambda: FakeGroup.made[1].ends("left"))
    CLOCK.at(8.0, lambda: there.discard("n2"))
    CLOCK.at(12.0, lambda: first_group().ends("finished") if FakeGroup.made[1].gone else None)
    assert as_replica_groups(job, lease).status == "finished"
