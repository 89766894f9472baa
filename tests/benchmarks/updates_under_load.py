"""What an update costs those who ask meanwhile; run by hand.

    python tests/benchmarks/updates_under_load.py [--json] [--repeats 10]

A cluster of a head and two nodes, an app of two replicas of an engine that answers a token every 10 ms
without computing, clients at 70 % of what the replicas run at once, half of them streaming. Every way to
update is gone `--repeats` times, in turn; then as many versions that fail (they do not start, do not answer
their probes, fail requests), in turn with the ways. Failed: requests that did not get a whole answer; mixed:
answers that are not wholly of the version that their header names. p99 is of the time of an answer, of the
requests that overlap the update, and of those before. Pause: the longest time without an answer ending.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.serve import ServeAppConfig
from cluster.errors import ShoalError
from serve_apps.spec import AppSpec
from tests.clusters import started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.fake_engine import make_fake_model
from tests.serve_apps.load import Load, under_load

ENGINE = "tests.serve_apps.fake_engine:FakeEngine"
WAYS = ("rolling", "blue_green", "in_place")
FAULTS = ("start", "probes", "requests")
BATCH = 8
REPLICAS = 2
CLIENTS = round(0.7 * REPLICAS * BATCH)
TOKENS = 20
BEFORE_S = 3.0


class Bench:
    """The app while it goes from version to version."""

    def __init__(self, directory: Path, call: Driver, url: str) -> None:
        self._directory = directory
        self._call = call
        self._url = url
        self._version = 0

    def spec(self, way: str, fails: str = "") -> AppSpec:
        """The next version."""
        self._version += 1
        behaviour: dict[str, Any] = {"offset": 1000 * self._version}
        if fails:
            behaviour["fails"] = fails
        path = make_fake_model(self._directory / str(self._version), **behaviour)
        if (way, fails) == ("in_place", "start"):
            (path / "model.safetensors").write_bytes(b"no weights")
        config = ServeAppConfig.model_validate(
            {
                "model": str(path),
                "replicas": {"min": REPLICAS},
                "rollout": way,
                "update": {"hold_s": 2.0, "watch_s": 30.0},
                "limits": {"batch": BATCH, "queue": 100, "max_tokens": TOKENS},
            }
        )
        name = f"m@{self._version}"
        return AppSpec("chat", config, model_path=str(path), model_version=name, engine=ENGINE)

    def go(self, way: str, fails: str = "") -> dict[str, Any]:
        """One update under load."""
        before = self._row()["model"] if self._version else None
        with under_load(self._url, CLIENTS, max_tokens=TOKENS) as load:
            threading.Event().wait(BEFORE_S)
            began = time.monotonic()
            spec = self.spec(way, fails)
            try:
                self._call(driver.deploy, spec)
            except ShoalError:
                assert fails, "a good version failed"
            self._settle(spec.model_version if not fails else str(before))
            ended = time.monotonic()
            threading.Event().wait(1.0)
        return self._told(load, way, fails, began, ended)

    def _settle(self, version: str) -> None:
        """Wait until this version serves, and nothing else is there."""
        while True:
            row = self._row()
            if (row["model"], row["status"], row["replicas"]) == (version, "running", REPLICAS):
                return
            threading.Event().wait(0.2)

    def _row(self) -> dict[str, Any]:
        row = self._call(driver.status, "chat")
        assert row is not None
        return row

    def _told(self, load: Load, way: str, fails: str, began: float, ended: float) -> dict[str, Any]:
        during = [a for a in load.answers if a.began + a.seconds >= began and a.began <= ended]
        earlier = [a for a in load.answers if a.began + a.seconds < began]
        outcome = self._row()["rollout"]
        return {
            "way": way,
            "fails": fails,
            "requests": len(load.answers),
            "failed": len(load.failed),
            "errors": sorted({answer.error for answer in load.failed})[:3],
            "mixed": len(load.mixed()),
            "seconds": ended - began,
            "pause_s": load.longest_gap(began, ended),
            "held_back_s": outcome["pause_s"],
            "p99_s": percentile(sorted(a.seconds for a in during), 0.99),
            "p99_before_s": percentile(sorted(a.seconds for a in earlier), 0.99),
        }


def percentile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def table(rows: list[dict[str, Any]]) -> None:
    heads = ("update", "runs", "requests", "failed", "mixed", "takes", "pause", "worst", "p99", "p99 before")
    print(("{:<24}" + "{:>11}" * (len(heads) - 1)).format(*heads))
    groups = dict.fromkeys((row["way"], row["fails"]) for row in rows)
    for way, fails in groups:
        of = [row for row in rows if (row["way"], row["fails"]) == (way, fails)]

        def median(key: str, of: list[dict[str, Any]] = of) -> str:
            return f"{statistics.median(row[key] for row in of):.2f} s"

        print(
            f"{way + (' fails: ' + fails if fails else ''):<24}{len(of):>11}"
            f"{sum(row['requests'] for row in of):>11}{sum(row['failed'] for row in of):>11}"
            f"{sum(row['mixed'] for row in of):>11}{median('seconds'):>11}{median('pause_s'):>11}"
            f"{max(row['pause_s'] for row in of):>9.2f} s{median('p99_s'):>11}{median('p99_before_s'):>11}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--failures", type=int, help="versions that fail; as many as repeats by default")
    options = parser.parse_args()
    failures = options.repeats if options.failures is None else options.failures
    rows = []
    nodes = "nodes: [{name: head, cpus: 0}, {name: worker, count: 2, cpus: 4}]"
    with (
        tempfile.TemporaryDirectory() as scratch,
        started(Path(scratch), nodes, "storage: ./storage") as cluster,
        Driver(cluster.record) as call,
    ):
        url = call(driver.start)
        bench = Bench(Path(scratch) / "models", call, url)
        call(driver.deploy, bench.spec("rolling"))
        for repeat in range(options.repeats):
            for way in WAYS:
                rows.append(bench.go(way))
                print(f"{repeat + 1}/{options.repeats} {rows[-1]}", file=sys.stderr)
        for number in range(failures):
            rows.append(bench.go(WAYS[number % 3], FAULTS[number // 3 % 3]))
            print(f"{number + 1}/{failures} {rows[-1]}", file=sys.stderr)
        call(driver.stop)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        table(rows)


if __name__ == "__main__":
    main()
