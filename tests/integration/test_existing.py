"""A Ray cluster that people have started on three hosts, which share one directory and nothing else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.lans import SHARE, Workplace, needs_hosts, workplace

pytestmark = [needs_hosts, pytest.mark.timeout(600)]

STORAGE = f"{SHARE}/shoal"
CONFIG = "/root/shoal.yaml"
TOUR = "/root/tour"
WAIT_S = 150.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """Ray on three hosts: a head without CPUs, and two others of two and three."""
    with workplace(tmp_path_factory.mktemp("lab"), ["head", "gpu-1", "gpu-2"]) as lab:
        lab.start_ray(lab.head, "--num-cpus=0")
        for host, cpus in zip(lab.lan.hosts[1:], (2, 3), strict=True):
            lab.start_ray(host, f"--num-cpus={cpus}")
        cluster = {"name": "lab", "provider": "existing", "storage": STORAGE}
        lab.head.file(CONFIG).write_text(yaml.safe_dump({"cluster": cluster}))
        yield lab


def wait_for(condition: Callable[[], Any], otherwise: str) -> float:
    """Wait until a condition holds; how many seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_S, otherwise
        threading.Event().wait(0.2)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def tour(lab: Workplace) -> dict[str, Any]:
    """What the quickstart says of the cluster, which it leaves up."""
    done = lab.shoal("quickstart", "-f", CONFIG, "--dir", TOUR, "--keep", "--json", timeout_s=400)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_the_whole_way_through_shoal(tour: dict[str, Any]) -> None:
    assert {step["name"]: step["ok"] for step in tour["steps"]} == {
        "write the config": True,
        "start the cluster": True,
        "train, and lose a worker": True,
        "recover": True,
        "evaluate": True,
        "publish": True,
        "serve": True,
        "ask": True,
        "share devices under load": True,
    }
    shared = tour["steps"][-1]["detail"]
    assert "steps lost, none of" in shared
