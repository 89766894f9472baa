"""The engines of one app, as its replicas tell of them, and what these are to do about them; no Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from serve_apps.controller.engine_places import PlacedEngine, StandingBy

MOST_FAILURES = 2
"""So many engines may fail to start, one after the other, before it is said that they cannot."""
RETRY_S = 1.0
MOST_RETRY_S = 30.0
"""How long it is waited before the next one is started, twice as long each time."""


@dataclass(frozen=True)
class EngineStart:
    """What a replica is to have an engine on: a node, and the name of the devices there; `early`: others have
    to leave them first; `parks`: it may be parked later."""

    node: str
    devices: str
    early: bool = False
    parks: bool = False


Key = tuple[str, str]
"""A Serve application, and the id of a replica of it."""


@dataclass
class _Failures:
    """Those of a Serve application's engines since one was ready."""

    count: int = 0
    not_before: float = 0.0
    words: str = ""


@dataclass
class AppEngines:
    """Orders that are not carried out yet, and failures.

    Attributes:
        starts: replicas that are to have an engine.
        early: those whose devices are kept for them and not granted yet, and the node of these: they get
            everything ready that takes none, and Ray is not asked for any.
        gone: replicas that have said that they end, until Ray knows it too.
        lost: nodes that do not answer, and the engines there with them.
        ends: the number of the table since which a replica gets no requests, that is to give its engine back;
            None before there is one.
    """

    starts: dict[Key, EngineStart] = field(default_factory=dict)
    early: dict[Key, str] = field(default_factory=dict)
    ends: dict[Key, int | None] = field(default_factory=dict)
    parks: dict[Key, Mapping[str, Any]] = field(default_factory=dict)
    """Those of `ends` whose engine is to be parked: `most_bytes`, see `EngineHost.park`."""
    discards: set[Key] = field(default_factory=set)
    """Replicas that are to end a parked engine."""
    gone: set[Key] = field(default_factory=set)
    lost: Set[str] = frozenset()
    _failures: dict[str, _Failures] = field(default_factory=dict)
    _failed: dict[Key, int] = field(default_factory=dict)
    """How often a replica has said that its engine does not start."""

    def hear(self, application: str, replica: str, facts: Mapping[str, Any], now: float) -> None:
        """Take in what a replica says of its engine."""
        key, failures = (application, replica), facts["failures"]
        if failures > self._failed.get(key, 0):
            self._failed[key] = failures
            self.starts.pop(key, None)
            known = self._failures.setdefault(application, _Failures())
            wait_s = min(MOST_RETRY_S, RETRY_S * 2**known.count)
            self._failures[application] = _Failures(known.count + 1, now + wait_s, facts["failure"])
        if facts["state"] == "ready":
            self.starts.pop(key, None)
            self._failures.pop(application, None)
        if facts["parked"] is None:
            self.discards.discard(key)
        if facts["state"] == "standby":
            self.ends.pop(key, None)
            self.parks.pop(key, None)
            if key not in self.starts:
                self.early.pop(key, None)

    def end(self, application: str, replica: str, *, park: Mapping[str, Any] | None = None) -> None:
        """A replica is to have no engine any more.

        Args:
            park: it keeps the weights of one that is ready: `most_bytes`, see `EngineHost.park`.
        """
        key = application, replica
        self.starts.pop(key, None)  # it may not have been told
        self.ends.setdefault(key, None)
        if park is not None:
            self.parks[key] = park

    def failure(self, application: str) -> str | None:
        """Why its engines cannot be started; None while they may."""
        known = self._failures.get(application)
        return known.words if known is not None and known.count >= MOST_FAILURES else None

    def may_start(self, application: str, now: float) -> bool:
        """Whether another one is tried: not at once where one has failed."""
        known = self._failures.get(application)
        return known is None or now >= known.not_before

    def placed(self, application: str, said: Mapping[str, Mapping[str, Any]]) -> list[PlacedEngine]:
        """The engines that there are or will be, in the order in which they were ready; early ones left out.

        Args:
            said: what its replicas say, by id.
        """
        found = []
        for replica, facts in _by_age(said):
            key = application, replica
            if self._is_lost(facts) or key in self.early:
                continue
            if facts["state"] == "standby":
                if key in self.starts:
                    found.append(PlacedEngine(replica, self.starts[key].node, "starting"))
            elif key in self.ends:
                found.append(PlacedEngine(replica, facts["engine_node"], "ending"))
            else:
                found.append(PlacedEngine(replica, facts["engine_node"], facts["state"]))
        return found

    def devices(self, application: str, said: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """The names of the devices of its engines, and their nodes: those of the oldest first, and last those
        of the ones that end; early ones left out. When an app is to have fewer, the broker takes the last
        first."""
        stay: dict[str, str] = {}
        end: dict[str, str] = {}
        for replica, facts in _by_age(said):
            if facts["state"] != "standby" and (application, replica) not in self.early:
                ends = facts["state"] == "ending" or (application, replica) in self.ends
                (end if ends else stay)[facts["devices"]] = facts["engine_node"]
        starts = {
            start.devices: start.node
            for key, start in self.starts.items()
            if key[0] == application and key not in self.early
        }
        return stay | starts | end

    def starting(self, application: str, said: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The nodes of those of `devices` on which nothing answers yet."""
        ready = {facts["devices"] for facts in said.values() if facts["state"] in ("ready", "ending")}
        return [node for name, node in self.devices(application, said).items() if name not in ready]

    def standing_by(self, application: str, said: Mapping[str, Mapping[str, Any]]) -> list[StandingBy]:
        """The replicas that could have an engine."""
        return [
            StandingBy(replica, facts["node"], parked["node"] if (parked := facts["parked"]) else None)
            for replica, facts in sorted(said.items())
            if facts["state"] == "standby" and (application, replica) not in self.starts
        ]

    def active(self, application: str, said: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The replicas that get requests."""
        return sorted(
            replica
            for replica, facts in said.items()
            if facts["state"] == "ready"
            and (application, replica) not in self.ends
            and not self._is_lost(facts)
        )

    def _is_lost(self, facts: Mapping[str, Any]) -> bool:
        return facts["state"] != "standby" and facts["engine_node"] in self.lost

    def order(
        self, application: str, replica: str, facts: Mapping[str, Any], all_know: Callable[[int], bool]
    ) -> dict[str, Any] | None:
        """What a replica is to do about its engine: `action` start (with what its `EngineStart` says), end
        (also while it starts; `park`: how it is parked, None: it is not), discard (the one that is parked),
        or lose (it is on a node that is lost, and the replica may know later).

        Args:
            all_know: whether every gateway goes by the table of this number.
        """
        key = application, replica
        if facts["state"] == "standby" and key in self.starts:
            return {"action": "start", **vars(self.starts[key])}
        if facts["state"] == "standby" and key in self.discards and facts["parked"] is not None:
            return {"action": "discard"}
        if facts["state"] in ("starting", "ready") and self._is_lost(facts):
            return {"action": "lose"}
        if facts["state"] == "starting" and key in self.ends:
            return {"action": "end", "park": None}
        if facts["state"] == "ready" and key in self.ends:
            number = self.ends[key]
            if number is not None and all_know(number):
                return {"action": "end", "park": self.parks.get(key)}
        return None

    def told(self, number: int) -> None:
        """The gateways are told, under this number, of what is decided now."""
        for key in self.ends:
            if self.ends[key] is None:
                self.ends[key] = number

    def keep_only(self, applications: Collection[str], replicas: Callable[[str], Sequence[str]]) -> None:
        """Forget applications but these, and replicas that are there no more."""
        there = {(name, replica) for name in applications for replica in replicas(name)}
        for known in (self.starts, self.early, self.ends, self.parks, self._failed):
            for key in [key for key in known if key not in there]:
                del known[key]
        self.discards &= there
        for name in self._failures.keys() - set(applications):
            del self._failures[name]


def _by_age(said: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Replicas and what they say, in the order in which their engines were ready."""
    return sorted(said.items(), key=lambda each: each[1]["ready_at"] or "~")
