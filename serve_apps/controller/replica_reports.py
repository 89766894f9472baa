"""What the replicas of one app have said of themselves, and when; no Ray."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SILENT_S = 5.0
"""A replica that was not heard of for so long counts no more; it reports several times a second."""


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica said last, and when (on a steady clock)."""

    heard: float
    facts: Mapping[str, Any]
    """`node` (its id), `state` of its engine (standby, starting, ready, ending); `failures` (how often it did
    not start) and `failure` (why, the last time); `parked` (see `ParkedEngine.facts`, or None). With an
    engine: `engine_node`, `devices` (their name), `revision`, `woken` (it was parked before) and `not_woken`
    (why another one that was parked was not). With one that is ready: busy, context_length, prepared,
    refused, refusal; engine (its `Statistics`); started_at and ready_at: when it was ordered and when it
    could answer, ISO 8601 in UTC."""


@dataclass
class ReplicaReports:
    """By Serve application and replica; each method takes the Serve application's name."""

    contexts: dict[str, int] = field(default_factory=dict)
    """By Serve application that has ever been ready: the context length of its model."""
    _last: dict[str, dict[str, ReplicaReport]] = field(default_factory=dict)
    _met: dict[tuple[str, str], str] = field(default_factory=dict)
    """By Serve application and replica: when its engine was ordered that was heard last."""
    _homes: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    """By Serve application and replica: its node, and when it was heard, also when it is not any more."""

    def hear(
        self, application: str, replica: str, facts: Mapping[str, Any], now: float
    ) -> tuple[str, dict[str, Any]] | None:
        """Take over what a replica says; an event when it has an engine that was never heard before."""
        self._last.setdefault(application, {})[replica] = ReplicaReport(now, facts)
        self._homes[application, replica] = facts["node"], now
        if facts["state"] != "ready":
            return None
        self.contexts[application] = facts["context_length"]
        if self._met.get((application, replica)) == facts["started_at"]:
            return None
        self._met[application, replica] = facts["started_at"]
        told = {name: facts[name] for name in ("started_at", "ready_at", "woken")}
        if facts["not_woken"]:
            told["not_woken"] = facts["not_woken"]
        return "replica_ready", {"replica": replica, "revision": facts["revision"], **told}

    def excuse(self, now: float) -> None:
        """Take no replica's silence until now for an end."""
        for said in self._last.values():
            for replica, report in said.items():
                said[replica] = replace(report, heard=now)

    def forget(self, application: str, replica: str) -> None:
        """A replica has ended."""
        self._last.get(application, {}).pop(replica, None)

    def said(self, application: str, now: float) -> dict[str, Mapping[str, Any]]:
        """What its replicas said last, by id; those that are silent are forgotten."""
        said = self._last.get(application, {})
        for replica in [each for each, report in said.items() if now - report.heard > SILENT_S]:
            del said[replica]
        return self.said_ever(application)

    def said_ever(self, application: str) -> dict[str, Mapping[str, Any]]:
        """What its replicas said last, by id, those that have been silent since included."""
        return {replica: report.facts for replica, report in self._last.get(application, {}).items()}

    def ready(self, application: str, now: float) -> list[Mapping[str, Any]]:
        """What those of them said that have an engine which answers."""
        return [facts for facts in self.said(application, now).values() if facts["state"] == "ready"]

    def homes(self, application: str) -> dict[str, str]:
        """The nodes of its replicas, by id, also of those that are not heard of any more."""
        return {replica: home for (name, replica), (home, _) in self._homes.items() if name == application}

    def silence(self, application: str, replica: str, now: float) -> float:
        """Seconds since a replica was heard; infinity: it never was."""
        return now - self._homes.get((application, replica), ("", -math.inf))[1]

    def engine_figures(self, applications: Collection[str], now: float) -> dict[str, dict[str, Any]]:
        """By replica: what its engine says of itself, and for how long it is ready."""
        return {
            replica: {"ready_s": report.facts["ready_s"] + now - report.heard, **report.facts["engine"]}
            for name in applications
            for replica, report in self._last.get(name, {}).items()
            if now - report.heard <= SILENT_S and report.facts["state"] == "ready"
        }

    def keep_living(self, living: Collection[str]) -> None:
        """Forget where replicas are, and which engine each had, but these."""
        self._homes = {key: home for key, home in self._homes.items() if key[1] in living}
        heard = {replica for said in self._last.values() for replica in said}
        self._met = {key: at for key, at in self._met.items() if key[1] in living or key[1] in heard}

    def keep_only(self, applications: Collection[str]) -> None:
        """Forget all that is about other Serve applications."""
        for known in (self._last, self.contexts):
            for application in known.keys() - set(applications):
                del known[application]
        self._homes = {key: home for key, home in self._homes.items() if key[0] in applications}
        self._met = {key: at for key, at in self._met.items() if key[0] in applications}
