"""What the processes of serving cost while nobody asks anything; run by hand.

    python tests/benchmarks/idle_serving.py [--json] [--seconds 60]

A cluster of its own (a head, two workers), Serve, the gateway and no app. The table gives for each process
its own memory (USS) and how much of a core it keeps busy over those seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.clusters import LiveCluster, started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver

TITLES = {
    "ray::ServeController": "Serve's controller",
    "ray::ProxyActor": "Serve's proxy",
    "ray::AppController": "controller of the apps",
    "ray::ServeReplica:gateway": "gateway",
}
SETTLE_S = 10.0


def measure(cluster: LiveCluster, seconds: float) -> list[dict[str, Any]]:
    """One row a process."""
    pause = threading.Event()
    with Driver(cluster.record) as call:
        call(driver.start)
        pause.wait(SETTLE_S)
        found = [(name, process) for title, name in TITLES.items() for process in cluster.processes(title)]
        before = [sum(process.cpu_times()[:2]) for _, process in found]
        pause.wait(seconds)
        rows = [
            {
                "process": name,
                "uss_mib": round(process.memory_full_info().uss / 2**20, 1),
                "cores": round((sum(process.cpu_times()[:2]) - then) / seconds, 4),
            }
            for (name, process), then in zip(found, before, strict=True)
        ]
        call(driver.stop)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, started(Path(folder)) as cluster:
        rows = measure(cluster, options.seconds)
    if options.json:
        print(json.dumps({"machine_cores": psutil.cpu_count(), "processes": rows}, indent=2))
        return
    for row in rows:
        print(f"{row['process']:24} {row['uss_mib']:8.1f} MiB {100 * row['cores']:6.2f} % of a core")


if __name__ == "__main__":
    main()
