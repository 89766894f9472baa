"""A cluster in simulated time: replicas that start and drain, gateways that learn late, few devices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.config.sections.serve import ReplicasConfig, ServeAppConfig, UpdateConfig
from serve_apps.controller.changes import change
from serve_apps.controller.decision import Decision, Seen
from serve_apps.controller.record import AppRecord, Revision
from serve_apps.controller.rollout import decide
from serve_apps.spec import AppSpec

TICK_S = 0.5


def spec_of(version: int, strategy: str = "rolling", replicas: int = 1, **update: float) -> AppSpec:
    config = ServeAppConfig.model_validate(
        {
            "model": "m@latest",
            "rollout": strategy,
            "replicas": ReplicasConfig(min=replicas).model_dump(),
            "update": UpdateConfig(**update).model_dump(),  # type: ignore[arg-type]
        }
    )
    return AppSpec("chat", config, model_path=f"/models/m/{version}", model_version=f"m@{version}")


@dataclass
class Replica:
    ready_at: float
    gone_at: float | None = None
    """When it has finished what it had; None while it is to stay."""


@dataclass
class World:
    """One app on a cluster with so many devices, a replica taking one.

    Args:
        broken: what is wrong with a version: `start`, `probe`, `hang` (never ready), `refuse` (in_place),
            `errors` (its requests fail).
    """

    devices: int
    seed: int = 0
    start_s: float = 4.0
    drain_s: float = 2.0
    latency_s: float = 0.5
    broken: Mapping[str, str] = field(default_factory=dict)
    record: AppRecord = field(default_factory=lambda: AppRecord("chat"))
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.applications: dict[str, list[Replica]] = {}
        self.failed: dict[str, str] = {}
        self.probes: dict[int, str] = {}
        self.tried: set[int] = set()
        """The revisions that have ever passed their probes."""
        self.loaded: dict[str, int] = {}
        """By application: the revision whose weights its replicas have."""
        self.loading: dict[str, tuple[int, float]] = {}
        self.prepared: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.tables: list[tuple[float, frozenset[str]]] = []
        """What the gateways were told, and when."""
        self.in_flight: dict[str, float] = {}
        """By application: until when its last request takes."""
        self.counts: dict[int, list[int]] = {}
        self.asks: Mapping[str, int] = {}
        self.last = Decision(self.record)

    def change(self, spec: AppSpec) -> None:
        self.record = change(self.record, spec, self.now)

    def held(self, application: str) -> int:
        return len(self.applications.get(application, ()))

    def ready(self, application: str) -> int:
        return sum(
            replica.ready_at <= self.now and replica.gone_at is None
            for replica in self.applications.get(application, ())
        )

    def taking(self) -> int:
        """Ready replicas of the applications that the gateways send requests to."""
        return sum(self.ready(name) for name in self.known())

    def known(self) -> frozenset[str]:
        """What the gateways go by now."""
        told = [names for at, names in self.tables if at + self.latency_s <= self.now]
        return told[-1] if told else frozenset()

    def drained(self, application: str) -> bool:
        told = [names for at, names in self.tables]
        if not told:
            return True
        closed = application not in told[-1] and application not in self.known()
        pending = any(application in names for at, names in self.tables if at + self.latency_s > self.now)
        return closed and not pending and self.in_flight.get(application, 0.0) <= self.now

    def granted(self, holder: str) -> int:
        others = sum(
            self.held(name) for name in {r.application for r in self.record.revisions if r.holder != holder}
        )
        return max(0, min(self.asks.get(holder, 0), self.devices - others))

    def seen(self, revision: Revision) -> Seen:
        name, number = revision.application, revision.number
        version = revision.spec.model_version
        wrong = self.broken.get(version)
        requests, errors = self.counts.get(number, [0, 0])
        return Seen(
            ready=self.ready(name),
            held=self.held(name),
            granted=self.granted(revision.holder),
            gone=name not in self.applications,
            failure=self.failed.get(name),
            probe=self.probes.get(number),
            drained=self.drained(name),
            taken=bool(self.tables) and name in self.tables[-1][1] and name in self.known(),
            requests=requests,
            errors=errors,
            prepared=self.ready(name) if self.prepared.get(name) == number else 0,
            loaded=self.ready(name) if self.loaded.get(name) == number else 0,
            refusal="refused" if wrong == "refuse" and self.refused.get(name) == number else None,
        )

    def step(self, wanted: int) -> Decision:
        """One look, one decision, and what follows from it."""
        self.now += TICK_S
        self._pass_time()
        seen = {revision.number: self.seen(revision) for revision in self.record.revisions}
        decision = self.last = decide(self.record, seen, wanted, self.now)
        self.record, self.asks = decision.record, decision.asks
        revisions = {revision.number: revision for revision in self.record.revisions}
        opened = frozenset(revisions[n].application for n in decision.traffic | decision.standby)
        if not self.tables or self.tables[-1][1] != opened:
            self.tables.append((self.now, opened))
        self._check(decision, revisions, seen)
        for number, size in decision.sizes.items():
            if number in revisions and number not in decision.delete:
                self._resize(revisions[number], size)
        for number in decision.delete:
            name = revisions[number].application
            assert self.drained(name), "an application with requests was deleted"
            for replica in self.applications.get(name, []):
                replica.gone_at = replica.gone_at or self.now
            if name in self.applications and not self.applications[name]:
                del self.applications[name]
        if decision.probe is not None:
            wrong = self.broken.get(revisions[decision.probe].spec.model_version)
            self.probes[decision.probe] = "wrong answer" if wrong == "probe" else ""
            if wrong != "probe":
                self.tried.add(decision.probe)
        if decision.order is not None and decision.ordered is not None:
            revision = revisions[decision.ordered]
            if self.broken.get(revision.spec.model_version) == "refuse":
                self.refused[revision.application] = revision.number
            elif decision.order == "prepare":
                self.prepared[revision.application] = revision.number
            else:
                assert self.drained(revision.application), "weights were changed under a request"
                at = self.now + self.random.uniform(0, 2)
                self.loading.setdefault(revision.application, (revision.number, at))
        return decision

    def _check(self, decision: Decision, revisions: Mapping[int, Revision], seen: Mapping[int, Seen]) -> None:
        """What may never be decided."""
        for number in decision.traffic:
            revision = revisions[number]
            assert self.loaded[revision.application] == number, "requests go to other weights"
            if revision is not self.record.serving:
                assert number in self.tried, "requests go to what was not tried out"
        starts: dict[str, int] = {}
        for number, size in decision.sizes.items():
            if number not in revisions:
                continue
            name, holder = revisions[number].application, revisions[number].holder
            if size == 0 and self.held(name):
                assert self.drained(name), "the last replica was taken away under its requests"
            starts[holder] = starts.get(holder, 0) + max(0, size - self.held(name))
        for holder, count in starts.items():
            names = {r.application for r in revisions.values() if r.holder == holder}
            granted = max(seen[n].granted for n, r in revisions.items() if r.holder == holder and n in seen)
            assert not count or sum(map(self.held, names)) + count <= granted, "more than was granted"

    def _pass_time(self) -> None:
        for name in self.known():
            if self.ready(name):
                self.in_flight[name] = self.now + self.random.uniform(0, self.drain_s)
                for revision in self.record.revisions:
                    if revision.application == name and revision.number in self.last.traffic:
                        count = self.counts.setdefault(revision.number, [0, 0])
                        count[0] += 5
                        if self.broken.get(revision.spec.model_version) == "errors":
                            count[1] += 3
        for name, (number, at) in list(self.loading.items()):
            if at <= self.now:
                self.loaded[name] = number
                del self.loading[name]
        for name, replicas in self.applications.items():
            wrong = self._wrong(name)
            if wrong == "start" and any(r.ready_at <= self.now for r in replicas):
                self.failed[name] = "it does not start"
                replicas.clear()
            replicas[:] = [r for r in replicas if r.gone_at is None or r.gone_at > self.now]

    def _wrong(self, name: str) -> str | None:
        for revision in self.record.revisions:
            if revision.application == name and name.endswith(f":{revision.number}"):
                return self.broken.get(revision.spec.model_version)
        return None

    def _resize(self, revision: Revision, size: int) -> None:
        name = revision.application
        if name not in self.applications:
            if size == 0:
                return
            self.applications[name] = []
            self.loaded[name] = revision.number
        if name in self.failed:
            return
        replicas = self.applications[name]
        staying = [replica for replica in replicas if replica.gone_at is None]
        for replica in staying[size:]:
            replica.gone_at = self.now + self.random.uniform(0, self.drain_s)
        free = self.devices - sum(map(len, self.applications.values()))
        hangs = self._wrong(name) == "hang"
        for _ in range(min(free, size - len(staying))):
            delay = 1e9 if hangs else self.random.uniform(0.5, self.start_s)
            replicas.append(Replica(self.now + delay))

    def forget(self) -> None:
        """The controller is killed and comes back."""
        self.probes.clear()
        self.record = AppRecord.from_json(self.record.as_json())

    def serving(self, version: int, replicas: int) -> World:
        """Have a first version running."""
        strategy = "rolling"
        self.change(spec_of(version, strategy, replicas))
        for _ in range(200):
            self.step(replicas)
            if self.record.update is None and self.taking() >= replicas:
                self.record = replace(self.record, watch_until=0.0)
                return self
        raise AssertionError("the first version was not ready")
