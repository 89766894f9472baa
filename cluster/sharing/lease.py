"""One holder's lease: what it asks for, what it was told, and which of its units run, come or go."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.sharing.demand import Demand, Grant

Gang = tuple[str, ...]
"""The nodes of units that come and go together."""


@dataclass(frozen=True)
class StandingLease:
    """A lease as the allocation should see it.

    Attributes:
        demand: with `held` set to what is the holder's: gangs that run, then those it was promised.
        promised: indexes in `held` of units that do not run yet, those that are being started among them.
        leaving: the node of every unit that still runs, but was told to go.
        origins: for each gang of `held`, the gang that runs in its stead; None where nothing runs of it.
    """

    demand: Demand
    promised: tuple[int, ...]
    leaving: tuple[str, ...]
    origins: tuple[Gang | None, ...]


@dataclass
class Lease:
    """What is known of one holder.

    A grant is kept by whole gangs, whatever the order of units inside a gang or of gangs in `held`.

    - A gang that was told and is held, runs. One that was told and is not held is promised: it may be
      starting. Of training, one that ended on a node that is avoided is not promised its place again.
    - A gang of training that was taken out of the grant is leaving until it is no longer held. It cannot be
      called back, since it may have said goodbye already.
      Until then no other gang of it is granted on exactly the same nodes: nobody could tell them apart.
    - A gang that is held and never was told runs elsewhere than it was told: it stands for one of those.
    - A gang that lost a node keeps what is left of it while it is completed: the gang that was told in its
      stead has those places, not others beside them. If the node answers again meanwhile, it goes on.
    - Serving starts and ends replicas where it likes; only their number follows the grant. So any surplus may
      stay after all, whichever it is.

    Attributes:
        since: when it asked first.
        heard: when it asked last.
        told: the nodes of the last grant that the holder was given, gang after gang; None before the first.
        changed: when that grant became another than the one before; None before the first.
        waiting_since: since when its minimum is not met; None when it is.
    """

    demand: Demand
    since: float
    heard: float
    told: tuple[str, ...] | None = None
    changed: float | None = None
    waiting_since: float | None = None
    _completes: list[tuple[Gang, Gang]] = field(default_factory=list)
    """Gangs that were told in the stead of gangs that lost a node, each with the one that ran then."""
    _dismissed: list[Gang] = field(default_factory=list)
    """Gangs that were told to go and are held still."""

    def renew(self, demand: Demand, now: float, avoided: Collection[str] = ()) -> None:
        """Take in what the holder says now.

        Args:
            avoided: ids of nodes on which a gang of training that has ended is not started again.
        """
        if self.told is not None and (demand.gang, demand.unit) != (self.demand.gang, self.demand.unit):
            self.told = None  # it is made of other parts than before: only what runs counts
            self._completes, self._dismissed = [], []
        if avoided and self.told and demand.kind == "training":
            self.told = tuple(self._to_start_again(demand, avoided))
        self.demand, self.heard = demand, now

    def _to_start_again(self, demand: Demand, avoided: Collection[str]) -> Iterator[str]:
        """What was told, without the gangs that have ended since and had a unit on a node that is avoided."""
        held, holds = (_Pile(_gangs(each.held, demand.gang)) for each in (self.demand, demand))
        for gang in _gangs(self.told or (), demand.gang):
            held_before, held_now = held.take(gang), holds.take(gang)
            if held_before is None or held_now is not None or not any(node in avoided for node in gang):
                yield from gang

    def standing(self, alive: Collection[str]) -> StandingLease:
        """What runs, what is promised and what leaves, given the ids of the nodes that are there."""
        size, held = self.demand.gang, _gangs(self.demand.held, self.demand.gang)
        if self.told is None:
            return StandingLease(self.demand, (), (), tuple(held))
        rest = _Pile(held)
        kept: list[tuple[Gang, Gang | None]] = []
        absent: list[Gang] = []
        for gang in _gangs(self.told, size):
            found = rest.take(gang)
            if found is None:
                absent.append(gang)
            else:
                kept.append((found, found))
        awaited = []
        for gang in absent:
            was = next((was for now, was in self._completes if _key(now) == _key(gang)), None)
            # One whose nodes are all back needs nothing in its stead.
            found = None if was is None or _is_whole(was, alive) else rest.take(was)
            if found is None:
                awaited.append(gang)
            else:
                kept.append((gang, found))
        leaving = [node for gang in self._dismissed if rest.take(gang) for node in gang]
        elsewhere = [gang for gang in rest.left() if _is_whole(gang, alive)]
        # What is left of a gang that lost a node is of no use, and in the way until it is gone.
        leaving += [node for gang in rest.left() if not _is_whole(gang, alive) for node in gang]
        kept += [(gang, gang) for gang in elsewhere]
        awaited = awaited[: max(0, len(awaited) - len(elsewhere))]
        for gang, was in kept:
            if was is not gang:
                leaving += (Counter(was) - Counter(gang)).elements()
        room = max(0, self.demand.most // size - len(kept))
        kept += [(gang, None) for gang in awaited[:room]]
        promised = []
        starting = _Pile(_gangs(self.demand.starting, size))
        for index, (gang, was) in enumerate(kept):
            running = Counter(was or ())
            if was is not None and starting.take(was) is not None:
                running.clear()
            for offset, node in enumerate(gang):
                if running[node] > 0:
                    running[node] -= 1
                else:
                    promised.append(index * size + offset)
        units = tuple(node for gang, _ in kept for node in gang)
        return StandingLease(
            replace(self.demand, held=units), tuple(promised), tuple(leaving), tuple(was for _, was in kept)
        )

    def tellable(self, grant: Grant, alive: Collection[str]) -> Grant:
        """The part of a grant that the holder can be told now; the rest waits until what leaves is gone.

        Of training, the rest is gangs on the very places of gangs that are leaving. Serving is told no place
        where nothing runs yet while a replica has to leave: by their number it would not know that one has.
        """
        size, standing = self.demand.gang, self.standing(alive)
        new = _gangs(grant.nodes, size)
        if self.demand.kind == "serving":
            rest = _Pile(new)
            running = [gang for gang in standing.origins if gang is not None and _is_whole(gang, alive)]
            stays = [gang for gang in running if rest.take(gang) is not None]
            told = new if len(stays) == len(running) else stays
        else:
            kept, held = _Pile(_gangs(standing.demand.held, size)), _Pile(_gangs(self.demand.held, size))
            leaving = {_key(gang) for gang in self._dismissed if held.take(gang) is not None}
            told = [gang for gang in new if kept.take(gang) is not None or _key(gang) not in leaving]
        return replace(grant, nodes=tuple(node for gang in told for node in gang))

    def tell(self, grant: Grant, alive: Collection[str], now: float) -> bool:
        """Note that the holder is given this grant; whether it is another than the one before.

        Args:
            alive: ids of the nodes that the grant was decided on.
        """
        size, standing = self.demand.gang, self.standing(alive)
        new = _gangs(grant.nodes, size)
        rest = _Pile(new)
        completes = []
        broken = []
        for gang, was in zip(_gangs(standing.demand.held, size), standing.origins, strict=True):
            stays = rest.take(gang) is not None
            if was is None:
                continue
            if not stays:
                broken.append((gang, was))
            elif _key(was) != _key(gang):  # told before, and not taken up yet
                completes.append((gang, was))
        for gang, was in broken:
            survivors = Counter(node for node in gang if node in alive)
            if not survivors or survivors.total() == size:
                continue
            heir = next((each for each in rest.left() if not survivors - Counter(each)), None)
            if heir is not None:
                rest.take(heir)
                completes.append((heir, was))
        self._completes = completes
        if self.demand.kind == "training":
            self._dismiss(new, completes, alive)
        before = [_key(gang) for gang in _gangs(self.told or (), size)]
        first = self.told is None
        self.told = grant.nodes
        self.waiting_since = None if grant.units >= self.demand.min else self._waits_from(now)
        if Counter(before) == Counter(map(_key, new)):
            return first
        if not _only_lost(before, new, alive):
            self.changed = now
        return True

    def _dismiss(
        self, new: Sequence[Gang], completes: Sequence[tuple[Gang, Gang]], alive: Collection[str]
    ) -> None:
        """Note which of the gangs that are held have to go.

        Not those on a node that is gone: it may answer again, and what runs there was in nobody's way.
        """
        rest = _Pile(_gangs(self.demand.held, self.demand.gang))
        for gang in (*new, *(was for _, was in completes)):
            rest.take(gang)
        self._dismissed = [gang for gang in rest.left() if _is_whole(gang, alive)]

    def _waits_from(self, now: float) -> float:
        return now if self.waiting_since is None else self.waiting_since


def _gangs(units: Sequence[str], size: int) -> list[Gang]:
    return [tuple(units[first : first + size]) for first in range(0, len(units), size)]


def _key(gang: Gang) -> Gang:
    """The same for gangs on the same nodes."""
    return gang if len(gang) == 1 else tuple(sorted(gang))


def _is_whole(gang: Gang, alive: Collection[str]) -> bool:
    return all(node in alive for node in gang)


class _Pile:
    """Gangs that are taken away one by one, by the nodes that they are on."""

    def __init__(self, gangs: Sequence[Gang]) -> None:
        self._gangs: dict[int, Gang] = dict(enumerate(gangs))
        self._at: dict[Gang, deque[int]] = {}
        for position, gang in self._gangs.items():
            self._at.setdefault(_key(gang), deque()).append(position)

    def take(self, gang: Gang) -> Gang | None:
        """Remove the first gang on the same nodes, and return it as it stands here."""
        positions = self._at.get(_key(gang))
        return self._gangs.pop(positions.popleft()) if positions else None

    def left(self) -> list[Gang]:
        """Those that were not taken, in their order."""
        return list(self._gangs.values())


def _only_lost(before: Sequence[Gang], new: Sequence[Gang], alive: Collection[str]) -> bool:
    """Whether all that changed is that gangs on nodes which are gone are not there any more."""
    stayed = Counter(gang for gang in before if _is_whole(gang, alive))
    return stayed == Counter(map(_key, new))
