"""A training job while it is simulated: its gangs, how far it is, and where its device-seconds went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cluster.sharing.demand import Demand
from infra.lab.simulator.costs import Costs
from infra.lab.simulator.jobs import Job


class State(Enum):
    """What a gang does with its devices."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"


_STAYS_FIRST = (State.RUNNING, State.STARTING, State.LEAVING)


@dataclass(eq=False)
class SimulatedGang:
    """Units that come and go together: the node of each, and what they do."""

    places: tuple[str, ...]
    state: State = State.STARTING


@dataclass
class Spent:
    """Device-seconds of one holder or of many, by what they went into."""

    training: float = 0.0
    lost: float = 0.0
    """Computed, and computed again because all of the job stopped before the next checkpoint."""
    standing: float = 0.0
    """Groups that wait for others to join, or to recover from one that died."""
    starting: float = 0.0
    leaving: float = 0.0
    serving: float = 0.0
    """Replicas that are ready, whether requests come or not."""
    idle: float = 0.0
    down: float = 0.0

    def add(self, other: Spent) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def total(self) -> float:
        return math.fsum(vars(self).values())


@dataclass(eq=False)
class JobRun:
    """One job from its submission to its end.

    Work is counted in seconds of one group alone: so many groups do `costs.speed(groups)` of it in a second.

    Attributes:
        template: the demand of the job without what it holds.
        gang_groups: groups in one gang of that demand.
        done: work that counts; it falls back to `saved` when all of the job stops.
        progressed: all work that was ever done, what was lost included.
    """

    job: Job
    costs: Costs
    template: Demand
    gang_groups: int
    gangs: list[SimulatedGang] = field(default_factory=list)
    done: float = 0.0
    saved: float = 0.0
    progressed: float = 0.0
    lost: float = 0.0
    granted_at: float | None = None
    finished_at: float | None = None
    changed_at: float = -math.inf
    preemptions: int = 0
    failures: int = 0
    resizes: int = 0
    version: int = 0
    """Grows with every change; what was foreseen under an older one does not happen."""
    spent: Spent = field(default_factory=Spent)
    _synced_at: float = 0.0
    _stands_until: float = -math.inf
    _runs_since: float = math.inf
    _next_save: float = math.inf
    _unsaved: float = 0.0
    _demand: Demand | None = None

    @property
    def work(self) -> float:
        """Seconds that one group alone would take."""
        return self.job.duration_s * self.costs.speed(self.job.groups)

    @property
    def gang_devices(self) -> int:
        return self.job.group * self.gang_groups

    @property
    def waits(self) -> bool:
        """Nothing of it is granted, or all of it is on its way out."""
        return all(gang.state is State.LEAVING for gang in self.gangs)

    @property
    def running(self) -> int:
        return sum(gang.state is State.RUNNING for gang in self.gangs)

    def demand(self) -> Demand:
        """What it asks for now; gangs that leave are named last, as those that give way first."""
        if self._demand is None:
            self.gangs.sort(key=lambda gang: _STAYS_FIRST.index(gang.state))
            held = tuple(place for gang in self.gangs for place in gang.places)
            asked = self.template
            self._demand = Demand(
                *(asked.holder, asked.kind, asked.unit, asked.min, asked.max, held, asked.gang),
                *(asked.priority, asked.weight, asked.accelerator),
            )
        return self._demand

    def promised(self) -> range:
        """Of the units that its demand holds, those that do not run: they start up or leave."""
        return range(self.running * self.template.gang, len(self.demand().held))

    def changes(self, places: Sequence[str]) -> tuple[list[SimulatedGang], list[tuple[str, ...]]]:
        """The gangs that a grant of these places leaves out, and the places of those that it adds."""
        size = self.template.gang
        wanted = Counter(tuple(places[first : first + size]) for first in range(0, len(places), size))
        leaving = []
        for gang in self.gangs:  # in the order of the demand: of two in one place the later leaves
            if wanted[gang.places] > 0:
                wanted[gang.places] -= 1
            elif gang.state is not State.LEAVING:
                leaving.append(gang)
        return leaving, list(wanted.elements())

    def sync(self, now: float) -> None:
        """Bring progress and device-seconds up to this moment."""
        passed = now - self._synced_at
        if passed <= 0:
            return
        states = Counter(gang.state for gang in self.gangs)
        devices = self.gang_devices
        self.spent.starting += states[State.STARTING] * devices * passed
        self.spent.leaving += states[State.LEAVING] * devices * passed
        running = states[State.RUNNING]
        if running:
            stood = min(passed, max(0.0, self._stands_until - self._synced_at))
            self.spent.standing += running * devices * stood
            self.spent.training += running * devices * (passed - stood)
            self._progress(self._synced_at + stood, now, running)
        self._synced_at = now

    def _progress(self, begin: float, now: float, running: int) -> None:
        speed = self.costs.speed(running * self.gang_groups)
        devices = running * self.gang_devices
        if self._next_save <= now:
            every = self.costs.checkpoint_every_s
            newest = self._next_save + math.floor((now - self._next_save) / every) * every
            self.saved = self.done + speed * max(0.0, newest - begin)
            self._unsaved = devices * (now - max(newest, begin))
            self._next_save = newest + every
        else:
            self._unsaved += devices * (now - begin)
        self.done += speed * (now - begin)
        self.progressed += speed * (now - begin)

    def ends_at(self, now: float) -> float:
        """When it is done if nothing changes; it is up to date."""
        speed = self.costs.speed(self.running * self.gang_groups)
        if not speed:
            return math.inf
        return max(now, self._stands_until) + max(0.0, self.work - self.done) / speed

    def start(self, places: tuple[str, ...], now: float) -> SimulatedGang:
        """A gang is granted and starts up."""
        gang = SimulatedGang(places)
        self.gangs.append(gang)
        if self.granted_at is None:
            self.granted_at = now
        self._changed(now)
        return gang

    def join(self, gang: SimulatedGang, now: float) -> None:
        """A gang has started up and takes part; the others stand for a moment."""
        if not self.running:
            self._stands_until, self._runs_since = -math.inf, now
            self._next_save = now + self.costs.checkpoint_every_s
        elif self._runs_since < now:  # those that start together do not wait for one another
            self._stands_until = max(self._stands_until, now + self.costs.join_pause_s)
        gang.state = State.RUNNING
        self._changed(now)

    def leave(self, gangs: Iterable[SimulatedGang], now: float) -> None:
        """Gangs give way; where none is left that runs, the job falls back to its checkpoint."""
        for gang in gangs:
            gang.state = State.LEAVING
        if not self.running:
            self._fall_back()
        self._changed(now)

    def die(self, gangs: Iterable[SimulatedGang], now: float) -> None:
        """Gangs are gone with their node; the others stand for a moment, if there are any."""
        ran = self.running
        for gang in gangs:
            self.gangs.remove(gang)
        if ran and not self.running:
            self._fall_back()
            self.failures += 1
        elif ran > self.running:
            self._stands_until = max(self._stands_until, now + self.costs.kill_pause_s)
            self.failures += 1
        self._changed(now)

    def drop(self, gang: SimulatedGang, now: float) -> None:
        """A gang that gave way has left."""
        self.gangs.remove(gang)
        self._changed(now)

    def _fall_back(self) -> None:
        self.lost += self.done - self.saved
        self.done = self.saved
        self.spent.training -= self._unsaved
        self.spent.lost += self._unsaved
        self._unsaved = 0.0
        self._next_save = math.inf

    def _changed(self, now: float) -> None:
        self._demand = None
        self.changed_at = now
        self.version += 1
