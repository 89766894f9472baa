"""What happened to grants and nodes, each with its reason: the records, and the words for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.sharing.demand import Kind
from cluster.wording import counted

Cause = Literal[
    "waiting",
    "overdue",
    "started",
    "grew",
    "asked_less",
    "gave_way",
    "node_gone",
    "foreign_use",
    "place_taken",
    "avoided",
    "placed_elsewhere",
    "found",
    "held",
    "handed_over",
    "released",
    "expired",
    "node_joined",
    "node_back",
    "node_changed",
    "node_blamed",
    "node_avoided",
    "node_trusted",
    "broker_started",
]
"""Why something changed; cluster/sharing/README.md says what each means."""


@dataclass(frozen=True)
class Units:
    """Those that a holder names, by node.

    Attributes:
        starting: of those held.
    """

    held: Mapping[str, int]
    starting: Mapping[str, int]

    @property
    def running(self) -> Mapping[str, int]:
        return Counter(self.held) - Counter(self.starting)


UNITS = {"training": "worker", "serving": "replica"}


@dataclass(frozen=True)
class Event:
    """One change. Nodes are named as people name them.

    Attributes:
        holder, kind: whose grant; None for events of nodes and of the broker.
        unit: what one unit takes, in Ray's names.
        before, after: units that the holder was told, by node.
        held: units that the holder says run or are being started, by node, as of now.
        by: the holders that it gave way to.
        starting: those of `held` that are being started: nothing of them need be there yet.
        node, resources, foreign: of events of nodes: all that it has, and what strangers use of that.
        facts: of events about the trust in a node, in place of what it has; of the broker's start; of what
            was handed over.
        reason: a sentence.
    """

    cause: Cause
    reason: str
    holder: str | None = None
    kind: Kind | None = None
    unit: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    starting: Mapping[str, int] = field(default_factory=dict)
    node: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    foreign: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """The event without what does not concern it."""
        document: dict[str, Any] = {"cause": self.cause}
        if self.holder is not None:
            document |= {
                "holder": self.holder,
                "kind": self.kind,
                "unit": dict(self.unit),
                "before": dict(self.before),
                "after": dict(self.after),
                "held": dict(self.held),
                "starting": dict(self.starting),
                "by": list(self.by),
            }
        if self.node is not None:
            document["node"] = self.node
        if self.facts is not None:
            document["facts"] = dict(self.facts)
        elif self.node is not None:
            document |= {"resources": dict(self.resources), "foreign": dict(self.foreign)}
        return {**document, "reason": self.reason}


def units_of(kind: Kind, number: int) -> str:
    """`1 worker`, `2 replicas`."""
    return counted(number, UNITS[kind])


def places(units: Mapping[str, int]) -> str:
    """`worker-1 (2) and worker-2 (1)`; one node by its name alone."""
    if len(units) == 1:
        return next(iter(units))
    return listed([f"{node} ({count})" for node, count in sorted(units.items())])


def listed(words: Sequence[str], most: int = 6) -> str:
    """`a`, `a and b`, `a, b and c`; of many the first."""
    if len(words) > most:
        return ", ".join(words[:most]) + f" and {len(words) - most} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def grant_reason(
    cause: Cause,
    holder: str,
    kind: Kind,
    before: Mapping[str, int],
    after: Mapping[str, int],
    by: Sequence[str] = (),
    most: int = 0,
) -> str:
    """The sentence of an event about a grant.

    Args:
        by: the holders that it gave way to.
        most: units that it would take.
    """
    lost, won = Counter(before) - Counter(after), Counter(after) - Counter(before)
    less, more = units_of(kind, lost.total()), units_of(kind, won.total())
    now = f"has {sum(after.values())} of at most {units_of(kind, most)}"
    moved = f", and {more} came on {places(won)}" if won else ""
    if cause == "started":
        return f"{holder} was granted {more} on {places(won)}: it {now}"
    if cause == "grew":
        return f"{holder} grew by {more} on {places(won)}, where there is room: it {now}"
    if cause == "asked_less":
        return f"{holder} asked for less and gave up {less} on {places(lost)}: it {now}"
    if cause == "gave_way":
        return f"{holder} gave way to {listed(by)}: {less} leave {places(lost)}{moved}; it {now}"
    if cause == "node_gone":
        return f"{holder} lost {less} with {places(lost)}{moved}; it {now}"
    if cause == "place_taken":
        return f"{holder} was promised {less} on {places(lost)} where units of others run{moved}; it {now}"
    if cause == "avoided":
        return f"{holder} does not start {less} again on {places(lost)}, which fails jobs{moved}; it {now}"
    if cause == "placed_elsewhere":
        return f"{holder} runs {more} on {places(won)} instead of {places(lost)}; it {now}"
    if cause == "found":
        return f"{holder} runs already: it {now}, on {places(after)}"
    raise ValueError(f"no sentence for {cause}")


def held_reason(holder: str, kind: Kind, before: Units, after: Units) -> str:
    """The sentence about units that start, run or are gone, as their holder says."""
    gone = Counter(before.held) - Counter(after.held)
    parts = []
    for verb, come in (
        ("start", Counter(after.starting) - Counter(before.starting)),
        ("run", Counter(after.running) - Counter(before.running)),
    ):
        if come:
            verb += "s" if come.total() == 1 else ""
            parts.append(f"{units_of(kind, come.total())} {verb} on {places(come)}")
    if gone:
        verb = "is" if gone.total() == 1 else "are"
        parts.append(f"{units_of(kind, gone.total())} {verb} gone from {places(gone)}")
    return f"of {holder}, {' and '.join(parts)}"
