"""The gateway's table: which apps there are, which versions of each, and what a request may ask of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

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

    @property
    def capacity(self) -> int:
        """Requests that may run or wait at once; a group that comes back counts as one that is there."""
        return (
            max(self.spec.config.replicas.min, self.replicas) * self.spec.config.limits.batch
            + self.spec.config.limits.queue
        )


@dataclass(frozen=True)
class AppTable:
    """What the gateway knows at one moment; a new one replaces it when something changed.

    An app has one version today. A rollout will have two for a while, and will choose between them in
    `find`; nothing else in the gateway asks how many there are.
    """

    versions: Mapping[str, tuple[AppVersion, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By app, the preferred one first."""
    starting: frozenset[str] = frozenset()
    """Apps that Serve knows but that have never been ready since this gateway started."""

    def find(self, app: str) -> AppVersion | None:
        """The version that takes the next request."""
        versions = self.versions.get(app)
        return versions[0] if versions else None

    @property
    def names(self) -> list[str]:
        return sorted(self.versions)

    def not_ready(self) -> list[str]:
        """The apps that could not answer now."""
        waiting = {app for app, versions in self.versions.items() if not any(v.ready for v in versions)}
        return sorted(waiting | self.starting)

    @property
    def body_bytes(self) -> int | None:
        """Largest body that any app takes; None while there is no app."""
        return max(
            (v.spec.config.limits.body_bytes for vs in self.versions.values() for v in vs), default=None
        )
