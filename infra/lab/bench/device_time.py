"""Who had the devices for how long, from the events of the broker. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infra.lab.bench.asking import TimedAnswer
from infra.lab.bench.load_course import time_of


@dataclass(frozen=True)
class DeviceTime:
    """Device-seconds of one span of time.

    Attributes:
        total: of all devices there were.
        held: by kind of holder, training or serving: what units took that ran, were starting or leaving.
        strangers: what tasks and actors took that no lease speaks for.
    """

    total: float
    held: Mapping[str, float]
    strangers: float

    @property
    def nobody(self) -> float:
        """What nobody had."""
        return self.total - sum(self.held.values()) - self.strangers


def device_time(events: Iterable[Mapping[str, Any]], device: str, since: float, until: float) -> DeviceTime:
    """Count the devices from one moment to another.

    Args:
        events: of one cluster as its log has them, from the broker's start on.
        device: what counts as a device, in Ray's names: CPU, GPU.
        since, until: in Unix time.
    """
    nodes: dict[str, float] = {}
    foreign: dict[str, float] = {}
    holders: dict[str, tuple[str, float]] = {}
    total = strangers = 0.0
    held = {"training": 0.0, "serving": 0.0}
    now = since

    def count(to: float) -> None:
        nonlocal total, strangers, now
        span = max(0.0, min(to, until) - now)
        total += span * sum(nodes.values())
        strangers += span * sum(foreign.values())
        for kind, amount in holders.values():
            held[kind] += span * amount
        now += span

    for event in events:
        count(time_of(event))
        if "node" in event:
            nodes[event["node"]] = event["resources"].get(device, 0.0)
            foreign[event["node"]] = event["foreign"].get(device, 0.0)
        elif "holder" in event:
            units = sum(event["held"].values())
            holders[event["holder"]] = event["kind"], units * event["unit"].get(device, 0.0)
    count(until)
    return DeviceTime(total, held, strangers)


def granted(
    events: Iterable[Mapping[str, Any]], holder: str, since: float, until: float
) -> list[tuple[float, float, int]]:
    """What a holder was granted when: spans of time, from and to, with its units."""
    spans, units, now = [], 0, since
    for event in events:
        if event.get("holder") != holder:
            continue
        when = min(time_of(event), until)
        if when > now:
            spans.append((now, when, units))
            now = when
        units = sum(event["after"].values())
    return [*spans, (now, until, units)] if until > now else spans


def answering_s(answers: Iterable[TimedAnswer], since: float, until: float) -> float:
    """For how long replicas had a request in flight, in seconds, all replicas together.

    A request counts for the replica that answered it, from when it was sent to the end of its answer; one of
    which that is not known has waited, and counts for none.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for answer in answers:
        began, ended = max(since, answer.sent), min(until, answer.ended)
        if answer.replica is not None and ended > began:
            spans.setdefault(answer.replica, []).append((began, ended))
    seconds = 0.0
    for each in spans.values():
        reached = since
        for began, ended in sorted(each):
            seconds += max(0.0, ended - max(began, reached))
            reached = max(reached, ended)
    return seconds
