"""Which replicas get an engine, on which node, and which give theirs back; pure.

A replica of Serve holds nothing and may stand by on any node; its engine is where the broker has granted the
app a device, which need not be the replica's own node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

EngineState = Literal["starting", "ready", "ending"]


@dataclass(frozen=True)
class PlacedEngine:
    """An engine of a Serve application.

    Attributes:
        replica: the id of the replica that has it.
        node: the id of the node of its devices.
    """

    replica: str
    node: str
    state: EngineState


@dataclass(frozen=True)
class StandingBy:
    """A replica without an engine that answers.

    Attributes:
        node: the id of the node that it is on.
        parked: that of the node where it has a parked engine.
    """

    replica: str
    node: str
    parked: str | None = None


@dataclass(frozen=True)
class EngineChanges:
    """What is to be done now; repeating it does no harm.

    Attributes:
        starts: replicas that get an engine, and the node of each.
        ends: replicas that give theirs back, once they are drained.
    """

    starts: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()


def place(
    size: int,
    engines: Sequence[PlacedEngine],
    standing_by: Sequence[StandingBy] | None,
    granted: Sequence[str],
    *,
    dead: Collection[str] = (),
) -> EngineChanges:
    """What leads from the engines of an application to so many of them, where its app has its devices.

    An engine that has to leave its node, since that is not granted any more, goes when another is ready in
    its place. One that is ready is kept before one that starts.

    Args:
        engines: of the application, oldest first.
        standing_by: its other replicas; None: none is to start now, since one has failed to.
        granted: the nodes that its app may use for it, one for each engine, those of `engines` included
            where they may stay.
        dead: nodes that Ray has lost. What answers there still may compute on devices that are somebody
            else's soon: it is kept only while another is about to be there in its place.
    """
    room = Counter(granted)
    stays: list[PlacedEngine] = []
    leaves: list[PlacedEngine] = []
    running = [engine for engine in engines if engine.state != "ending"]
    for engine in sorted(running, key=lambda engine: engine.state != "ready"):
        if room[engine.node] > 0:
            room[engine.node] -= 1
            stays.append(engine)
        else:
            leaves.append(engine)
    for engine in engines:
        if engine.state == "ending":
            room[engine.node] -= 1  # its device is not free yet
    ready = [engine for engine in (*stays, *leaves) if engine.state == "ready"]
    starting = [engine for engine in stays if engine.state == "starting"]
    kept = ready[:size]
    settled = sum(engine in stays for engine in kept)
    ends = [*ready[size:], *(engine for engine in leaves if engine.state == "starting")]
    missing = max(0, size - settled)
    ends += starting[missing:]
    may_start = list((+room).elements()) if standing_by is not None else []
    wanted = max(0, missing - len(starting))
    starts = pair(standing_by or (), may_start)[:wanted]
    coming = min(missing, len(starting)) + min(wanted, len(may_start))
    on_dead = [engine for engine in kept if engine.node in dead and engine not in stays]
    ends += on_dead[coming:]
    return EngineChanges(tuple(starts), tuple(engine.replica for engine in ends))


def pair(standing_by: Sequence[StandingBy], nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Give replicas that stand by an engine, one on each of these nodes, as far as there are any: where one
    of theirs is parked first, then on their own node, and last those that lose a parked one by that."""
    free, left = list(standing_by), list(nodes)
    pairs: list[tuple[str, str]] = []
    kinds: tuple[Callable[[StandingBy, str], bool], ...] = (
        lambda replica, node: replica.parked == node,
        lambda replica, node: replica.parked is None and replica.node == node,
        lambda replica, node: replica.parked is None,
        lambda replica, node: True,
    )
    for fits in kinds:
        for replica in tuple(free):
            node = next((node for node in left if fits(replica, node)), None)
            if node is not None:
                free.remove(replica)
                left.remove(node)
                pairs.append((replica.replica, node))
    return pairs
