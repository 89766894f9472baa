"""What the controller remembers of an app: its revisions and how one takes over from another; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from serve_apps.spec import AppSpec

Strategy = Literal["start", "rolling", "blue_green", "in_place"]
Stage = Literal["prepare", "drain", "load", "probe", "return"]


@dataclass(frozen=True)
class Revision:
    """One thing that an app was deployed as."""

    number: int
    """1, 2, 3, … in the order in which they were asked for, of all apps that ever had the name."""
    application: str
    """The Serve application that runs it."""
    holder: str
    """Whose lease its replicas are counted in; revisions with replicas of one size share a lease."""
    spec: AppSpec
    created_at: float
    """Unix time."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Revision:
        return cls(**{**document, "spec": AppSpec.from_json(document["spec"])})

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "spec": self.spec.as_json()}


@dataclass(frozen=True)
class Update:
    """A revision on its way in (or, with `back`, out again). Times are Unix times."""

    number: int
    """The revision that is to take over."""
    strategy: Strategy
    began_at: float
    progress_at: float
    """When a replica of it became ready last."""
    ready: int = 0
    """Its replicas that were ready then."""
    switched_at: float | None = None
    """When it got all requests (blue_green)."""
    stage: Stage = "prepare"
    """How far it is (in_place)."""
    reloads: bool | None = None
    """Whether the only replica takes other weights, since no device is free for another one (rolling); None
    while that has not come up."""
    paused_at: float | None = None
    """Since when requests wait (in_place)."""
    back: bool = False
    broken: bool = False
    """It goes back because it does not work: it gets no further requests."""
    reason: str = ""
    """Why it goes back."""


@dataclass(frozen=True)
class Outcome:
    """How the last rollout of an app ended, or stands."""

    number: int
    strategy: Strategy
    to_version: str
    from_version: str | None = None
    status: Literal["running", "succeeded", "failed", "rolled_back"] = "running"
    """`failed`: it did not work, and the old version serves; `rolled_back`: somebody asked for that."""
    reason: str = ""
    seconds: float = 0.0
    pause_s: float = 0.0
    """How long requests waited (in_place)."""


@dataclass(frozen=True)
class Successor:
    """What was asked for while an update was under way, which ends for it."""

    number: int
    """The revision's, once it begins."""
    spec: AppSpec


@dataclass(frozen=True)
class AppRecord:
    """One app as the controller keeps it, in the storage too."""

    name: str
    revisions: tuple[Revision, ...] = ()
    """Those that Serve has, by number."""
    active: int | None = None
    """The revision that serves; while another takes over, the one that it takes over from."""
    update: Update | None = None
    previous: AppSpec | None = None
    """What it was before the active revision: where `rollback` leads."""
    outcome: Outcome | None = None
    watch_until: float = 0.0
    """Until when errors of the active revision bring the previous one back. Unix time."""
    rejected: tuple[str, ...] = ()
    """Model versions that failed: they are not followed to again."""
    newest: int = 0
    """The highest number given out."""
    removed: bool = False
    """It is being taken down."""
    successor: Successor | None = None
    """What it becomes as soon as no update is under way."""

    def application_of(self, number: int) -> str:
        """The Serve application of a revision that has one of its own."""
        return f"{self.name}:{number}"

    @property
    def applications(self) -> frozenset[str]:
        """The Serve applications that run its revisions, or that may still come to."""
        own = {self.application_of(revision.number) for revision in self.revisions}
        return frozenset(own | {revision.application for revision in self.revisions})

    @property
    def gone(self) -> bool:
        """Whether it has been taken down: what is left says how it ended, and which numbers it has used."""
        return self.removed and not self.revisions

    def revision(self, number: int | None) -> Revision | None:
        return next((each for each in self.revisions if each.number == number), None)

    @property
    def serving(self) -> Revision | None:
        """The active revision."""
        return self.revision(self.active)

    @property
    def coming(self) -> Revision | None:
        """The revision that takes over."""
        return self.revision(self.update.number) if self.update is not None else None

    @property
    def wanted(self) -> AppSpec | None:
        """What the app is to be in the end."""
        if self.successor is not None:
            return self.successor.spec
        update = self.update
        goal = self.serving if update is None or update.back else self.coming
        return None if goal is None else goal.spec

    def without(self, number: int) -> AppRecord:
        return replace(self, revisions=tuple(each for each in self.revisions if each.number != number))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> AppRecord:
        update, outcome, previous = (document[key] for key in ("update", "outcome", "previous"))
        successor = document.get("successor")
        return cls(
            **{
                **document,
                "revisions": tuple(Revision.from_json(each) for each in document["revisions"]),
                "update": None if update is None else Update(**update),
                "outcome": None if outcome is None else Outcome(**outcome),
                "previous": None if previous is None else AppSpec.from_json(previous),
                "rejected": tuple(document["rejected"]),
                "successor": None
                if successor is None
                else Successor(successor["number"], AppSpec.from_json(successor["spec"])),
            }
        )

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "revisions": [each.as_json() for each in self.revisions],
            "update": None if self.update is None else asdict(self.update),
            "outcome": None if self.outcome is None else asdict(self.outcome),
            "previous": None if self.previous is None else self.previous.as_json(),
            "rejected": list(self.rejected),
            "successor": None
            if self.successor is None
            else {"number": self.successor.number, "spec": self.successor.spec.as_json()},
        }
