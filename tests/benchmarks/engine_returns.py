"""How soon an app answers that has no replica, and one that has lost a rank; by hand.

    python tests/benchmarks/engine_returns.py [--rounds 10]

On a cluster of its own with the model of `shoal bench sharing`. From zero: an app with `replicas.min: 0` has
given its last replica back; seconds from a request to its first token. A killed rank: of an app with two
replicas a rank is killed (SIGKILL); seconds until as many replicas are ready as before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx

from cluster.files.storage import Storage
from infra.lab.bench.own_cluster import OwnCluster
from infra.lab.bench.sharing_plan import SharingPlan
from serve_apps.commands import remove
from serve_apps.controller.store import AppStore
from tests.serve_apps.drills import until

ZERO, TWO = "zero", "two"
PATIENCE_S = 120.0
REST_S = 3.0
"""Between two rounds: longer than what goes on after one."""


def apps() -> dict[str, Any]:
    soon = {"idle_s": 1, "downscale_delay_s": 1, "upscale_delay_s": 0.1}
    return {
        ZERO: {"model": "served@latest", "replicas": {"min": 0, "max": 1}, "autoscale": soon},
        TWO: {"model": "served@latest", "replicas": {"min": 2, "max": 2}},
    }


def first_token_s(base_url: str) -> float:
    began = time.monotonic()
    body = {"model": ZERO, "prompt": "import os", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{base_url}/completions", json=body, timeout=60) as answer:
        answer.raise_for_status()
        next(line for line in answer.iter_lines() if line.startswith("data:"))
        return time.monotonic() - began


def from_zero(cluster: OwnCluster, base_url: str) -> float:
    until(lambda: not cluster.processes(f"shoal::Engine:{ZERO}:"), PATIENCE_S)
    time.sleep(REST_S)
    return first_token_s(base_url)


def after_a_kill(cluster: OwnCluster, events: Callable[[str], list[dict[str, Any]]]) -> float:
    def ready() -> list[dict[str, Any]]:
        return [each for each in events(TWO) if each["kind"] == "replica_ready"]

    time.sleep(REST_S)
    before = len(ready())
    killed = time.time()
    cluster.processes(f"shoal::Engine:{TWO}:")[0].kill()
    until(lambda: len(ready()) > before, PATIENCE_S)
    return datetime.fromisoformat(ready()[-1]["ready_at"]).timestamp() - killed


def show(what: str, found: list[float]) -> None:
    each = ", ".join(f"{seconds:.2f}" for seconds in found)
    print(f"{what}: median {statistics.median(found):.2f} s, worst {max(found):.2f} s ({each})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = range(parser.parse_args().rounds)
    config = {**SharingPlan().config(), "serve_apps": apps()}
    with OwnCluster(config, lambda said: print(said, file=sys.stderr)) as cluster:
        job = cluster.submit("served")
        job.until(lambda: job.events("finished"), "the model was not trained", PATIENCE_S)
        record = cluster.record
        store = AppStore(Storage(record.storage), record.name, record.cluster_id)
        base_url = cluster.serve([ZERO])
        show("from zero to a first token", [from_zero(cluster, base_url) for _ in rounds])
        remove([ZERO])
        cluster.serve([TWO])
        show("from a rank's kill to all replicas", [after_a_kill(cluster, store.events) for _ in rounds])


if __name__ == "__main__":
    main()
