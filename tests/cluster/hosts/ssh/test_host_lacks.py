"""What a host lacks for Ray to be started on it, in sentences."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.hosts.ssh.fleet import FleetHost
from cluster.hosts.ssh.nodes import lacks
from cluster.hosts.ssh.ssh_connection import Destination
from cluster.version import version

HOST = FleetHost(Destination("gpu-1", "192.0.2.11", "ann"), "~/venv/bin/python")
WORDS = "gpu-1 (ann@192.0.2.11)"
VERSIONS = {"shoal": version(), "ray": "2.60.0", "torch": "2.13.0+cpu"}
FACTS: dict[str, Any] = {
    "python": [3, 11, 7],
    "executable": "/home/ann/venv/bin/python",
    "versions": VERSIONS,
    "temporary": "/scratch",
    "free_bytes": 2**34,
    "unwritable": None,
}


def test_a_host_like_the_head_lacks_nothing() -> None:
    assert lacks(HOST, FACTS, FACTS) == []


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"python": [3, 9, 2]}, f"{WORDS}: ~/venv/bin/python is Python 3.9.2; Shoal needs 3.11.4 at least"),
        (
            {"python": [3, 12, 1]},
            f"{WORDS} has Python 3.12.1, and the head 3.11.7: Ray needs one version on all hosts",
        ),
        (
            {"versions": {**VERSIONS, "shoal": "0.0.1"}},
            f"{WORDS} has Shoal 0.0.1, and this machine {version()}: one version on all",
        ),
        (
            {"versions": {**VERSIONS, "ray": "2.59.0"}},
            f"{WORDS} has ray 2.59.0, and the head 2.60.0: one version on all hosts",
        ),
        (
            {"versions": {**VERSIONS, "torch": None}},
            f"{WORDS} has torch not installed, and the head 2.13.0+cpu: one version on all hosts",
        ),
        (
            {"free_bytes": 2**29},
            f"{WORDS} has 0.50 GiB free in /scratch, where Ray keeps its files: it needs 1 GiB at least",
        ),
        (
            {"unwritable": "Read-only file system"},
            f"{WORDS}: nothing can be written in /scratch: Read-only file system",
        ),
    ],
)
def test_what_it_lacks_is_said(differs: dict[str, Any], sentence: str) -> None:
    assert lacks(HOST, {**FACTS, **differs}, FACTS) == [sentence]
