"""Each way in which a node may not fit the others, and the sentence that says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.hosts.misfits import Seen, misfits, notes

FACTS: dict[str, Any] = {
    "python": "3.11.7",
    "executable": "/venv/bin/python",
    "host": "gpu-0",
    "packages": {"shoal": "0.9.0", "ray": "2.60.0", "torch": "2.13.0+cpu"},
    "directory": "/tmp/ray",
    "free_bytes": 100 * 2**30,
    "size_bytes": 200 * 2**30,
    "gpus": 8,
    "driver": "570.10",
}
HEAD = Seen("gpu-0", facts=FACTS, address="192.0.2.10", ray_gpus=8)
STORAGE = "/data/shoal"


def other(**changes: Any) -> Seen:
    """A second node; names of facts go there, all else is of what was seen."""
    facts = {**FACTS, "host": "gpu-2", **{key: value for key, value in changes.items() if key in FACTS}}
    seen = {key: value for key, value in changes.items() if key not in FACTS}
    return replace(HEAD, **{"name": "gpu-2", "address": "192.0.2.12", "facts": facts, **seen})


def packages(**versions: str | None) -> dict[str, Any]:
    return {"packages": {**FACTS["packages"], **versions}}


def test_a_node_like_the_head_fits() -> None:
    assert misfits(HEAD, HEAD, STORAGE) == []
    assert misfits(other(), HEAD, STORAGE) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"silent": "no answer within 60 s"}, "node gpu-2 did not answer: no answer within 60 s"),
        (packages(shoal=None), "Shoal is not installed on node gpu-2 (in /venv/bin/python)"),
        (packages(shoal="0.8.1"), "node gpu-2 has Shoal 0.8.1, the head has 0.9.0 (in /venv/bin/python)"),
        (packages(torch="2.12.1"), "node gpu-2 has torch 2.12.1, the head has 2.13.0+cpu (in /venv/bin/pyth"),
        (packages(ray="2.59.0"), "node gpu-2 has Ray 2.59.0, the head has 2.60.0"),
        ({"python": "3.12.1"}, "node gpu-2 has Python 3.12.1, the head has 3.11.7"),
        (
            {"unwritable": "Read-only file system"},
            "node gpu-2 cannot write under /data/shoal: Read-only",
        ),
        ({"unseen": ("gpu-0",)}, "node gpu-2 does not see the files that gpu-0 wrote under /data/shoal"),
        ({"clock_off_s": 12.34}, "the clock of node gpu-2 is 12.3 s ahead of that of the head"),
        ({"clock_off_s": -60.0}, "the clock of node gpu-2 is 60.0 s behind that of the head"),
        ({"free_bytes": 2**30}, "the disk of node gpu-2 with /tmp/ray is full (1.0 of 200.0 GiB are free)"),
        ({"gpus": 7}, "Ray hands out 8 GPUs on node gpu-2, whose driver shows 7"),
        (
            {"unreached": (("gpu-0", "Connection refused"),)},
            "node gpu-2 cannot connect to node gpu-0 (Connection refused)",
        ),
        (
            {"address": "127.0.1.1", "unreached": (("gpu-0", "Connection refused"),)},
            "Ray has node gpu-2 at 127.0.1.1, where no other machine reaches it",
        ),
    ],
)
def test_each_misfit_has_its_sentence(changes: dict[str, Any], sentence: str) -> None:
    (said,) = misfits(other(**changes), HEAD, STORAGE)
    assert said.startswith(sentence)


@pytest.mark.parametrize(
    "changes",
    [
        packages(torch="2.13.0+cu130"),  # of the same version, built for GPUs
        packages(torch=None),  # a node that runs nothing but the head's services
        {"python": "3.11.9"},
        {"gpus": None},  # no NVIDIA driver says
        {"clock_off_s": 1.0},
    ],
)
def test_what_does_no_harm_is_let_pass(changes: dict[str, Any]) -> None:
    assert misfits(other(**changes), HEAD, STORAGE) == []


def test_a_head_at_a_loopback_address_is_named_as_the_cause() -> None:
    head = replace(HEAD, address="127.0.1.1")
    (said,) = misfits(other(unreached=(("gpu-0", "Connection refused"),)), head, STORAGE)
    assert said.startswith("Ray has node gpu-0 at 127.0.1.1")
    assert misfits(head, head, STORAGE) == []


def test_different_drivers_and_a_slow_dns_are_told() -> None:
    assert notes([HEAD, other()]) == []
    (drivers,) = notes([HEAD, other(driver="575.1")])
    assert drivers == "the nodes have different NVIDIA drivers: gpu-0 has 570.10, gpu-2 has 575.1"
    (dns,) = notes([HEAD, other(name_lookup_s=10.2)])
    assert dns.startswith("looking up the name of an address takes 10 s on gpu-2")
