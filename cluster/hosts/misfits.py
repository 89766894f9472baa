"""What of a node does not fit the others, in sentences: pure, from what a probe has seen."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_CLOCK_OFF_S = 5.0
"""Logs, certificates and signed requests to object stores are read by other machines' clocks."""
SLOW_LOOKUP_S = 1.0
FULL = 0.95
"""From this share of its disk on Ray starts nothing on a node (RAY_local_fs_capacity_threshold)."""
_WORDS = {"shoal": "Shoal", "ray": "Ray", "torch": "torch"}
_GIB = 2**30


@dataclass(frozen=True)
class Seen:
    """What a probe has seen of a node.

    Attributes:
        silent: why it did not answer; nothing else is known then.
        facts: see `ProbeAgent.facts`.
        clock_off_s: how far its clock is ahead of the head's, at the least; negative where it is behind.
        unwritable: why it cannot write to the storage.
        unseen: names of the nodes whose files it does not see there.
        unreached: (node, reason) of those that it cannot connect to.
        address: where Ray has it.
        ray_gpus: how many GPUs Ray hands out on it.
        name_lookup_s: how long it took to look up what an address is called.
    """

    name: str
    silent: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    clock_off_s: float = 0.0
    unwritable: str | None = None
    unseen: tuple[str, ...] = ()
    unreached: tuple[tuple[str, str], ...] = ()
    address: str = ""
    ray_gpus: float = 0.0
    name_lookup_s: float = 0.0


def misfits(node: Seen, head: Seen, storage: str) -> list[str]:
    """Why a node cannot be used, a sentence each; none where it can.

    Args:
        head: what was seen of the head, which sets what the others are held to.
        storage: the cluster's, as the config has it.
    """
    if node.silent is not None:
        return [f"node {node.name} did not answer: {node.silent}"]
    return [
        *_versions(node, head),
        *_storage(node, storage),
        *_clock(node),
        *_disk(node),
        *_gpus(node),
        *_network(node, head),
    ]


def _network(node: Seen, head: Seen) -> list[str]:
    alone = next((each for each in (node, head) if ipaddress.ip_address(each.address).is_loopback), None)
    if alone is not None and node.facts["host"] != head.facts["host"]:
        return [
            f"Ray has node {alone.name} at {alone.address}, where no other machine reaches it: it has to be"
            " started with its address in the network (`ray start --node-ip-address`)"
        ]
    return [
        f"node {node.name} cannot connect to node {other} ({reason}): ranks and gateways use ports that the"
        " system chooses, which have to be open between nodes"
        for other, reason in node.unreached
    ]


def notes(nodes: Sequence[Seen]) -> list[str]:
    """What people should know of the nodes though all of them can be used."""
    found = []
    drivers = {node.facts["driver"]: node.name for node in nodes if node.facts.get("driver") is not None}
    if len(drivers) > 1:
        words = ", ".join(f"{name} has {driver}" for driver, name in sorted(drivers.items()))
        found.append(f"the nodes have different NVIDIA drivers: {words}")
    slow = [node for node in nodes if node.name_lookup_s > SLOW_LOOKUP_S]
    if slow:
        words, longest_s = ", ".join(node.name for node in slow), max(node.name_lookup_s for node in slow)
        found.append(
            f"looking up the name of an address takes {longest_s:.0f} s on {words}, whose DNS server does not"
            " answer: every start of a training group waits for that"
        )
    return found


def _versions(node: Seen, head: Seen) -> list[str]:
    found = []
    executable = node.facts["executable"]
    mine, others = node.facts["packages"], head.facts["packages"]
    if mine["shoal"] is None:
        found.append(f"Shoal is not installed on node {node.name} (in {executable})")
    for package, word in _WORDS.items():
        here, there = mine[package], others[package]
        if None not in (here, there) and _public(here) != _public(there):
            found.append(f"node {node.name} has {word} {here}, the head has {there} (in {executable})")
    if _minor(node.facts["python"]) != _minor(head.facts["python"]):
        found.append(
            f"node {node.name} has Python {node.facts['python']}, the head has {head.facts['python']}"
        )
    return found


def _public(version: str) -> str:
    """Without what says how it was built: `2.13.0+cu130` and `2.13.0+cpu` are one version."""
    return version.partition("+")[0]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _storage(node: Seen, storage: str) -> list[str]:
    if node.facts["packages"]["shoal"] is None:
        return []
    if node.unwritable is not None:
        return [f"node {node.name} cannot write under {storage}: {node.unwritable}"]
    return [
        f"node {node.name} does not see the files that {other} wrote under {storage}: is it one and the same"
        " place on all nodes?"
        for other in node.unseen
    ]


def _clock(node: Seen) -> list[str]:
    if abs(node.clock_off_s) <= MOST_CLOCK_OFF_S:
        return []
    way = "ahead of" if node.clock_off_s > 0 else "behind"
    return [f"the clock of node {node.name} is {abs(node.clock_off_s):.1f} s {way} that of the head"]


def _disk(node: Seen) -> list[str]:
    free, size = node.facts["free_bytes"], node.facts["size_bytes"]
    if size == 0 or 1 - free / size < FULL:
        return []
    return [
        f"the disk of node {node.name} with {node.facts['directory']} is full ({free / _GIB:.1f} of"
        f" {size / _GIB:.1f} GiB are free): Ray starts nothing there"
    ]


def _gpus(node: Seen) -> list[str]:
    gpus = node.facts["gpus"]
    if gpus is None or node.ray_gpus <= gpus:
        return []
    return [f"Ray hands out {node.ray_gpus:g} GPUs on node {node.name}, whose driver shows {gpus}"]
