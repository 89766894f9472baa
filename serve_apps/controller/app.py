"""One app in the controller: its record, and what is known of it at the moment; no Ray."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from cluster.config.sections.serve import ServeAppConfig
from cluster.sharing.demand import Demand
from serve_apps.controller.app_engines import AppEngines
from serve_apps.controller.changes import on_trial
from serve_apps.controller.decision import Decision
from serve_apps.controller.gateways import Gateways
from serve_apps.controller.record import AppRecord, Revision
from serve_apps.controller.replica_reports import ReplicaReports
from serve_apps.controller.wants import FirstTokens, Load, OngoingMean, Wants, asked

EVENTS_KEPT = 20
HOPE_S = 30.0
"""For so long a want that is not granted is looked after as if it were about to be."""
STARTS_AT_ONCE = 2
"""Replicas that start to stand by."""
SHORT_S = 3.0
"""A want that is not granted for so long is told of."""


class ServedApplication(Protocol):
    """What is known of a Serve application."""

    @property
    def status(self) -> str: ...

    @property
    def ready(self) -> int: ...


@dataclass
class App:
    """What the controller knows of one app; all but `record` is lost with it, and found out again."""

    record: AppRecord
    wants: Wants = field(default_factory=Wants)
    first_tokens: FirstTokens = field(default_factory=FirstTokens)
    _ongoing_mean: OngoingMean = field(default_factory=OngoingMean, repr=False)
    sizes: dict[str, int] = field(default_factory=dict)
    """Replicas that each Serve application is to have."""
    traffic: frozenset[int] = frozenset()
    standby: frozenset[int] = frozenset()
    asks: Mapping[str, int] = field(default_factory=dict)
    engines: AppEngines = field(default_factory=AppEngines)
    leaving: frozenset[str] = frozenset()
    """The Serve applications that are being deleted for it."""
    decided: bool = False
    """The record as it is now has been acted on."""
    probes: dict[int, str] = field(default_factory=dict)
    """By revision: what was wrong with its answers to the probes; empty if nothing was."""
    failures: dict[int, str] = field(default_factory=dict)
    """By revision: why Serve did not take it."""
    shortage: str = ""
    """Why its first replicas are not granted."""
    granted: int = 0
    """Replicas that its leases allow."""
    _short_since: float | None = None
    _short_told: bool = False
    replicas: ReplicaReports = field(default_factory=ReplicaReports)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    _most: dict[str, int] = field(default_factory=dict)
    """By Serve application: the most replicas that it was to have."""
    _order: tuple[Literal["prepare", "load"], int] | None = None

    @property
    def busy(self) -> bool:
        """Something changes hands: it is looked at often."""
        starts = not self.traffic and self.wants.want > 0
        short = self._short_since is not None and time.monotonic() - self._short_since < HOPE_S
        moves = bool(self.engines.starts or self.engines.ends) or short
        return self.record.update is not None or self.record.removed or starts or moves

    def take(self, decision: Decision) -> None:
        """Make a decision the app's."""
        self.record = decision.record
        self.traffic, self.standby = decision.traffic, decision.standby
        self.asks, self.decided = decision.asks, True
        self._order = None
        if decision.order is not None and decision.ordered is not None:
            self._order = decision.order, decision.ordered
        for revision in self.record.revisions:
            size = decision.sizes.get(revision.number)
            if size is not None:
                self.sizes[revision.application] = size
        self.leaving = frozenset(
            revision.application for revision in self.record.revisions if revision.number in decision.delete
        )
        there = {revision.application for revision in self.record.revisions}
        for known in (self.sizes, self._most):
            for application in known.keys() - there:
                del known[application]
        self.replicas.keep_only(there)
        self.engines.keep_only(there, lambda name: list(self.replicas.said_ever(name)))

    def hear(
        self, application: str, replica: str, facts: Mapping[str, Any], now: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Take over what a replica says; an event when it has an engine that was never heard before."""
        self.engines.hear(application, replica, facts, now)
        return self.replicas.hear(application, replica, facts, now)

    def keep_homes(self, living: Collection[str]) -> None:
        """Forget replicas but these."""
        self.engines.gone = {key for key in self.engines.gone if key[1] in living}
        self.replicas.keep_living(living)

    def active(self, application: str, now: float) -> list[str]:
        """The ids of the replicas that get requests."""
        return self.engines.active(application, self.replicas.said(application, now))

    def standing(self, application: str, has: int | None = None) -> int | None:
        """How many replicas Serve is to have of an application: some stand by beside those with an engine.

        Never fewer than once: Serve would choose which of them go.

        Args:
            has: how many Serve is to have so far, by itself; None: it does not say.
        """
        size = self.sizes.get(application)
        if size is None:
            return None
        loaded = self.loaded_by(application)
        replicas = None if loaded is None else loaded.spec.config.replicas
        stand = size + (1 if replicas is None else replicas.standing_by(size))
        before = self._most.get(application, has)
        if before is not None:
            # Each takes seconds of a processor to start: few at once, of those that nobody waits for.
            said = self.replicas.said_ever(application)
            stand = max(size + 1, min(stand, len(said) + STARTS_AT_ONCE))
        if not self.replicas.contexts.get(application):
            stand = size  # whoever waits for the first has the processors
        self._most[application] = most = max(stand, before or 0)
        return most

    def loaded_by(self, application: str) -> Revision | None:
        """The revision whose weights the replicas of a Serve application are to have."""
        revisions = [r for r in self.record.revisions if r.application == application]
        update = self.record.update
        if update is not None and len(revisions) > 1:
            forward = update.stage in ("load", "probe")
            return self.record.coming if forward else self.record.serving
        return revisions[0] if revisions else None

    def order(
        self, application: str, replica: str, facts: Mapping[str, Any], all_know: Callable[[int], bool]
    ) -> dict[str, Any] | None:
        """What a replica that says this is to do: `action` (start, end, prepare, load), and with it
        `revision` and `spec`, and what `AppEngines.order` says.

        Args:
            all_know: whether every gateway goes by the table of this number.
        """
        order = self.engines.order(application, replica, facts, all_know)
        if order is not None:
            loaded = self.loaded_by(application)
            if loaded is None:
                return None
            return {**order, "revision": loaded.number, "spec": loaded.spec.as_json()}
        if facts["state"] != "ready":
            return None
        if self._order is not None and self._order[0] == "prepare":
            number = self._order[1]
            revision = self.record.revision(number)
            if revision is None or revision.application != application:
                return None
            if number in (facts["prepared"], facts["refused"]):
                return None
            return {"action": "prepare", "revision": number, "spec": revision.spec.as_json()}
        revision = self.loaded_by(application)
        if revision is None or facts["revision"] == revision.number or facts["refused"] == revision.number:
            return None
        # Where there is no way back, a replica that cannot load them is started anew with them.
        update = self.record.update
        ends = update is None or update.back
        spec = revision.spec.as_json()
        return {"action": "load", "revision": revision.number, "spec": spec, "or_end": ends}

    def update_want(
        self, gateways: Gateways, served: Mapping[str, ServedApplication], now: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Find out how many replicas the load asks for; an event when that is another number than before."""
        spec = self.record.wanted
        if spec is None:
            return None
        if self.wants.want == 0 and not self.sizes:
            # A new controller: what runs is what was wanted before.
            self.wants.want = max(
                (served[r.application].ready for r in self.record.revisions if r.application in served),
                default=0,
            )
        config = spec.config
        load = self._load(config, gateways, served, now)
        ask = asked(load, config.autoscale)
        before = self.wants.want
        want = self.wants.update(ask, config.replicas.min, config.replicas.most, config.autoscale, now)
        if want == before:
            return None
        return "wanted", {"replicas": want, "before": before, "ongoing": round(load.ongoing, 1)}

    def _load(
        self, config: ServeAppConfig, gateways: Gateways, served: Mapping[str, ServedApplication], now: float
    ) -> Load:
        names = {revision.application for revision in self.record.revisions}
        reports = [facts for name in names for facts in self.replicas.ready(name, now)]
        held_back = gateways.waiting(self.record.name, now)
        in_flight = sum(gateways.in_flight(name, now) for name in names)
        running = sum(facts["engine"]["running"] for facts in reports)
        # One that came and was answered between two looks is in flight at neither, and somebody was there.
        seldom = min(1, gateways.take_asked(self.record.name))
        ongoing = float(max(in_flight + held_back, seldom))
        replicas = sum(served[name].ready for name in names if name in served)
        return Load(
            ongoing=ongoing,
            mean_ongoing=self._ongoing_mean.add(ongoing, config.autoscale.look_back_period_s, now),
            places=replicas * config.limits.batch,
            waiting=float(max(0, in_flight - running) + held_back),
            cache_use=sum(facts["engine"]["cache_use"] for facts in reports) / max(1, len(reports)),
            first_token_s=self.first_tokens.percentile95(now),
            replicas=replicas,
        )

    def demands(self, nodes: Mapping[str, tuple[str, ...]]) -> list[Demand]:
        """What its leases ask of the broker, with the nodes of its replicas by Serve application."""
        holders: dict[str, list[Revision]] = {}
        for revision in self.record.revisions:
            holders.setdefault(revision.holder, []).append(revision)
        leading = self.record.serving or self.record.coming
        demands, now = [], time.monotonic()
        for holder, revisions in holders.items():
            names = list(dict.fromkeys(revision.application for revision in revisions))
            # Last, and so taken first, are those of which there are to be fewer.
            kept = [node for name in names for node in nodes.get(name, ())[: self.sizes.get(name, 0)]]
            rest = [node for name in names for node in nodes.get(name, ())[self.sizes.get(name, 0) :]]
            held = (*kept, *rest)
            spec = revisions[-1].spec
            fewest = 0
            if leading is not None and leading.holder == holder and not self.record.removed:
                fewest = leading.spec.config.replicas.min
            most = max(fewest, self.asks.get(holder, len(held)))
            said = {name: self.replicas.said(name, now) for name in names}
            starting = [node for name in names for node in self.engines.starting(name, said[name])]
            starting = list((Counter(starting) & Counter(held)).elements())
            demand = Demand(holder, "serving", min=fewest, max=most, held=held, **spec.standing)
            demands.append(replace(demand, starting=tuple(starting)))
        return demands

    def note_shortage(self, granted: Mapping[str, int], why_not: Any) -> None:
        """Ask why the first replicas are not granted."""
        update, coming = self.record.update, self.record.coming
        self.shortage = ""
        if update is None or coming is None or update.strategy != "start":
            return
        size = max(1, coming.spec.config.replicas.min)
        if granted.get(coming.holder, 0) < size:
            demand = Demand(coming.holder, "serving", min=size, max=size, **coming.spec.standing)
            self.shortage = why_not(demand, time.time() - update.began_at)

    def note_grant(self, granted: Mapping[str, int], now: float) -> tuple[str, dict[str, Any]] | None:
        """Take over what is granted; an event when it has been too little for a while, or is enough again."""
        self.granted = sum(granted.get(holder, 0) for holder in {r.holder for r in self.record.revisions})
        facts = {"wanted": self.wants.want, "granted": self.granted}
        if self.granted >= self.wants.want or self.record.removed:
            told, self._short_since, self._short_told = self._short_told, None, False
            return ("granted", facts) if told else None
        if self._short_since is None:
            self._short_since = now
        if self._short_told or now - self._short_since < SHORT_S:
            return None
        self._short_told = True
        return "not_granted", facts

    def table(self, served: Mapping[str, ServedApplication]) -> dict[str, Any]:
        """What the gateways need to know of it: the versions that are ready, the preferred one first."""
        versions: list[dict[str, Any]] = []
        active, traffic = self.record.active, self.traffic
        trial = on_trial(self.record, time.time())
        ordered = sorted(self.record.revisions, key=lambda r: (r.number not in traffic, r.number != active))
        for revision in ordered:
            context_length = self.replicas.contexts.get(revision.application)
            if context_length is None or revision.application in [v["application"] for v in versions]:
                continue
            application = served.get(revision.application)
            versions.append(
                {
                    "application": revision.application,
                    "revision": revision.number,
                    "spec": revision.spec.as_json(),
                    "context_length": context_length,
                    "created": int(revision.created_at),
                    "replicas": application.ready if application is not None else 0,
                    "active": self.active(revision.application, time.monotonic()),
                    "takes": revision.number in self.traffic,
                    "stands_by": revision.number in self.standby,
                    "on_trial": revision.number in trial,
                }
            )
        return {
            "versions": versions,
            "applications": sorted(self.record.applications),
            "wanted": self.wants.want,
            "granted": self.granted,
        }

    def describe(self, served: Mapping[str, ServedApplication]) -> dict[str, Any]:
        """The app for people: the row of `shoal status`."""
        record = self.record
        running = {r.application: served[r.application] for r in record.revisions if r.application in served}
        serving = record.serving or record.coming
        spec = serving.spec if serving is not None else None
        return {
            "name": record.name,
            "model": spec.model_version if spec is not None else None,
            "status": self._status(running),
            "replicas": sum(application.ready for application in running.values()),
            "engine": spec.engine if spec is not None else None,
            "tensor": spec.config.tensor if spec is not None else None,
            "wanted": self.wants.want,
            "granted": self.granted,
            "rollout": self._rollout(),
            "spec": spec.as_json() if spec is not None else None,
            "events": list(self.events),
        }

    def answering(self, served: Mapping[str, ServedApplication]) -> dict[str, bool]:
        """Whether the Serve application answers that is to, by its name; empty where none is."""
        serving = self.record.serving or self.record.coming
        if serving is None or self.record.removed or serving.application in self.leaving:
            return {}
        application = served.get(serving.application)
        ready = application is not None and application.ready > 0
        return {serving.application: ready} if self.wants.want > 0 else {}

    def _status(self, running: Mapping[str, ServedApplication]) -> str:
        update = self.record.update
        if self.record.removed:
            return "deleting"
        if update is not None:
            if update.strategy == "start":
                return "deploying"
            if update.back:
                return "going_back"
            return "updating" if update.switched_at is None else "holding"
        serving = self.record.serving
        if serving is None or serving.application not in running:
            return "deploying"
        if self.wants.want == 0:
            return "idle"
        return running[serving.application].status

    def _rollout(self) -> dict[str, Any] | None:
        """How the last rollout stands or ended."""
        outcome, update = self.record.outcome, self.record.update
        if outcome is None:
            return None
        document = dict(vars(outcome))
        document["reason"] = outcome.reason or None
        if update is not None:
            document["seconds"] = round(time.time() - update.began_at, 3)
            document["ready"] = update.ready
            document["stage"] = update.stage if update.strategy == "in_place" else None
            document["switched"] = update.switched_at is not None
        return document
