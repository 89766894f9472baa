"""The gateway's table: which apps there are, which versions of each, and what a request may ask of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from serve_apps.spec import AppSpec


@dataclass(frozen=True)
class AppVersion:
    """One version of an app: a Serve application of its own."""

    application: str
    """Name of the Serve application."""
    spec: AppSpec
    context_length: int
    created: int
    """Unix time of its deployment."""
    replicas: int
    """Replicas that run now."""
    ready: bool
    revision: int = 0
    """Which of the app's revisions it is: a replica answers for no other."""
    takes: bool = True
    """Whether it gets requests."""
    stands_by: bool = False
    """Whether it gets those that the others have failed."""
    on_trial: bool = False
    """Whether it is taken back if it fails too many."""


@dataclass(frozen=True)
class AppTable:
    """What the gateway knows at one moment; a new one replaces it when something changed.

    An app has several versions while one takes over from another, and none that takes requests while they
    wait for a version.
    """

    versions: Mapping[str, tuple[AppVersion, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By app, the preferred one first."""
    starting: frozenset[str] = frozenset()
    """Apps that have never been ready."""
    leaving: frozenset[str] = frozenset()
    """Apps that go with their cluster."""
    number: int = 0
    replicas: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: MappingProxyType({}))
    """By app, replicas `wanted`, `granted` and `ready`."""
    applications: frozenset[str] = frozenset()
    """All Serve applications of the apps, those included that cannot take requests yet, or just now."""
    active: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By Serve application: the ids of the replicas that have an engine."""

    @classmethod
    def from_json(cls, number: int, document: Mapping[str, Any]) -> AppTable:
        """What the controller of the apps says."""
        versions = {
            app: tuple(
                AppVersion(
                    application=each["application"],
                    spec=AppSpec.from_json(each["spec"]),
                    context_length=each["context_length"],
                    created=each["created"],
                    replicas=each["replicas"],
                    ready=each["replicas"] > 0,
                    revision=each["revision"],
                    takes=each["takes"],
                    stands_by=each["stands_by"],
                    on_trial=each["on_trial"],
                )
                for each in facts["versions"]
            )
            for app, facts in document.items()
        }
        replicas = {
            app: {
                "wanted": facts["wanted"],
                "granted": facts["granted"],
                "ready": sum(each["replicas"] for each in facts["versions"]),
            }
            for app, facts in document.items()
        }
        known = {app: each for app, each in versions.items() if each}
        leaving = frozenset(app for app, facts in document.items() if facts.get("leaves"))
        starting = frozenset(versions.keys() - known.keys() - leaving)
        applications = frozenset(name for facts in document.values() for name in facts["applications"])
        active = {
            each["application"]: tuple(each["active"])
            for facts in document.values()
            for each in facts["versions"]
        }
        return cls(
            MappingProxyType(known),
            starting,
            leaving,
            number,
            MappingProxyType(replicas),
            applications,
            MappingProxyType(active),
        )

    def find(self, app: str) -> AppVersion | None:
        """The version whose limits hold for the next request."""
        versions = self.versions.get(app)
        return versions[0] if versions else None

    def choose(
        self, app: str, in_flight: Mapping[str, int], avoid: Collection[int] = ()
    ) -> AppVersion | None:
        """The version that takes the next request; None while none does.

        Args:
            in_flight: requests by Serve application; of several versions the one with the fewest for each of
                its replicas is taken.
            avoid: revisions that have failed this request, taken only where there is no other.
        """
        versions = self.versions.get(app, ())
        takers = [version for version in versions if version.takes]
        if avoid and takers:
            others = [v for v in versions if (v.takes or v.stands_by) and v.revision not in avoid]
            takers = others or takers
        return min(
            takers,
            key=lambda v: (in_flight.get(v.application, 0) + 1) / max(1, v.replicas),
            default=None,
        )

    def capacity(self, app: str) -> int:
        """Requests that may run or wait at once; a group that comes back counts as one that is there."""
        version = self.find(app)
        if version is None:
            return 0
        config = version.spec.config
        replicas = sum(v.replicas for v in self.versions[app] if v.takes)
        return max(config.replicas.min, replicas) * config.limits.batch + config.limits.queue

    @property
    def names(self) -> list[str]:
        return sorted(self.versions)

    def not_ready(self) -> list[str]:
        """The apps that could not answer now; one that may have no replicas answers after a while."""
        waiting = {
            app
            for app, versions in self.versions.items()
            if not any(v.ready for v in versions) and versions[0].spec.config.replicas.min > 0
        }
        return sorted(waiting | self.starting)

    @property
    def body_bytes(self) -> int | None:
        """Largest body that any app takes; None while there is no app."""
        return max(
            (v.spec.config.limits.body_bytes for vs in self.versions.values() for v in vs), default=None
        )
