"""Which replicas get an engine, on which node, and which give theirs back; pure.

A replica of Serve holds nothing and may stand by on any node; its engine is where the broker has granted the
app a device, which need not be the replica's own node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    """A replica without an engine, and the node that it is on."""

    replica: str
    node: str


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
    size: int, engines: Sequence[PlacedEngine], standing_by: Sequence[StandingBy], granted: Sequence[str]
) -> EngineChanges:
    """What leads from the engines of an application to so many of them, where its app has its devices.

    An engine that has to leave its node, since that is not granted any more, goes when another is ready in
    its place. One that is ready is kept before one that starts.

    Args:
        engines: of the application, oldest first.
        standing_by: its other replicas.
        granted: the nodes that its app may use for it, one for each engine, those of `engines` included
            where they may stay.
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
    ends += starting[max(0, size - settled) :]
    wanted = size - settled - len(starting)
    return EngineChanges(_starts(wanted, standing_by, room), tuple(engine.replica for engine in ends))


def _starts(
    wanted: int, standing_by: Sequence[StandingBy], room: Counter[str]
) -> tuple[tuple[str, str], ...]:
    """Give replicas that stand by an engine: on their own node where that is granted."""
    starts: list[tuple[str, str]] = []
    free = list(standing_by)
    nodes = list((+room).elements())
    for near in (True, False):
        for replica in tuple(free):
            if len(starts) >= wanted or not nodes:
                return tuple(starts)
            if near and replica.node not in nodes:
                continue
            node = replica.node if near else nodes[0]
            nodes.remove(node)
            free.remove(replica)
            starts.append((replica.replica, node))
    return tuple(starts)
