"""Whether the log of events shows a device that was granted twice at any moment.

The events are replayed with arithmetic of their own. A unit occupies its node from the event that grants it,
or that says it is held, until events say that it is neither. Three promises are checked:

- what is granted or held never exceeds what a node has, but for replicas of serving that run where they were
  not granted: those are Serve's choice, and what was promised there moves at its holder's next word;
- what a holder ran that lost its lease unheard, and comes back with it, was granted to nobody meanwhile;
- what runs never exceeds it at all. What is being started need not be there yet; and where Serve has put a
  replica by itself, what was said to run there before may have made room for it unheard, until its holder's
  next word (one that says nothing new renews its lease without an event, or loses it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from typing import Any

from cluster.sharing.events import listed
from cluster.sharing.ledger import TTL_S
from cluster.wording import amounts


@dataclass
class _Holder:
    unit: Mapping[str, Fraction]
    told: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    starting: Counter[str] = field(default_factory=Counter)
    elsewhere: Counter[str] = field(default_factory=Counter)
    doubted: dict[str, float] = field(default_factory=dict)
    """Nodes where its units may have ended unheard, and since when."""

    def running(self, node: str, now: float) -> int:
        """Units there that run for all that is known."""
        if node in self.doubted and now - self.doubted[node] <= TTL_S:
            return 0
        return self.held[node] - self.starting[node]


@dataclass
class _Unheard:
    """A holder that lost its lease because it was not heard: it may be gone, or run on."""

    holder: _Holder
    """With what ran."""
    would_be_wrong: list[str] = field(default_factory=list)
    """What was granted twice, if it ran on."""


def granted_twice(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong, a sentence for each moment; empty when nothing is.

    Args:
        events: of one cluster as its log has them, in order, from a start of the broker on.
    """
    nodes: dict[str, dict[str, Fraction]] = {}
    holders: dict[str, _Holder] = {}
    unheard: dict[str, _Unheard] = {}
    found = []
    for event in events:
        if event["cause"] == "broker_started":
            # Who runs says so again before anything new is granted; what was promised is not known any more.
            nodes.clear()
            holders.clear()
            unheard.clear()
        elif "node" in event and "resources" not in event:
            continue  # about the trust in it
        elif "node" in event:
            if event["cause"] == "node_gone":
                nodes.pop(event["node"], None)
            else:
                nodes[event["node"]] = _exact(event["resources"])
                if event["cause"] == "node_joined":  # whatever was on another node of this name is gone
                    for holder in holders.values():
                        for units in (holder.told, holder.held, holder.starting, holder.elsewhere):
                            units.pop(event["node"], None)
        elif event["cause"] in ("released", "expired"):
            gone = holders.pop(event["holder"], None)
            unheard.pop(event["holder"], None)
            if gone is not None and event["cause"] == "expired":
                ran = gone.held - gone.starting
                unheard[event["holder"]] = _Unheard(_Holder(gone.unit, told=ran, held=ran))
        else:
            _apply(holders, event)
            back = unheard.pop(event["holder"], None)
            if back is not None and +back.holder.held and back.holder.held <= holders[event["holder"]].held:
                found += back.would_be_wrong  # it has run all along
        for node, has in nodes.items():
            found += _excess(node, has, holders, event)
            for name, silent in unheard.items():
                wrong = _excess(node, has, {**holders, name: silent.holder}, event)
                silent.would_be_wrong += [f"{each}, {name} unheard" for each in wrong]
    return found


def _apply(holders: dict[str, _Holder], event: Mapping[str, Any]) -> None:
    unit = _exact(event["unit"])
    now = _seconds(event)
    holder = holders.setdefault(event["holder"], _Holder(unit))
    after, held = Counter(event["after"]), Counter(event["held"])
    if event["cause"] == "found":
        holder.elsewhere += after - holder.told
    elif event["kind"] == "serving":  # what has come where nothing was told was not placed by a grant
        come = (held - holder.held) & (held - holder.told)
        holder.elsewhere += come
        for other in holders.values():
            if other is not holder:
                other.doubted = {node: now for node in come if other.held[node]} | other.doubted
    holder.unit, holder.told, holder.held = unit, after, held
    holder.starting = Counter(event.get("starting", {}))
    holder.elsewhere &= held
    holder.doubted.clear()


def _excess(
    node: str, has: Mapping[str, Fraction], holders: Mapping[str, _Holder], event: Mapping[str, Any]
) -> list[str]:
    granted: Counter[str] = Counter()
    running: Counter[str] = Counter()
    whose, now = [], _seconds(event)
    for name, holder in holders.items():
        units = max(holder.told[node], holder.held[node])
        if units:
            whose.append(f"{name} ({units})")
        for resource, amount in holder.unit.items():
            running[resource] += amount * holder.running(node, now)  # type: ignore[assignment]
            granted[resource] += amount * (units - holder.elsewhere[node])  # type: ignore[assignment]
    return [
        f"event {event.get('seq', '?')}: {what} on {node}, which has {amounts({resource: float(room)})}, are"
        f" {float(used[resource]):g} {resource}: {listed(whose)}"
        for what, used in (("granted", granted), ("held", running))
        for resource in used
        if used[resource] > (room := has.get(resource, Fraction(0)))
    ]


def _seconds(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp() if "time" in event else 0.0


def _exact(resources: Mapping[str, float]) -> dict[str, Fraction]:
    # As Ray counts: in ten-thousandths, so that 0.1 + 0.2 is 0.3.
    return {name: Fraction(round(amount * 10_000), 10_000) for name, amount in resources.items()}
