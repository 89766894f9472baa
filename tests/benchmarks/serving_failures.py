"""What it costs when something of the serving side dies or hangs under load; run by hand.

    python tests/benchmarks/serving_failures.py [--repeats 10] [--json] [--only KIND ...]

A cluster of a head and three nodes of 2 CPUs, an app of two replicas of two ranks, each on a node, and
clients that keep about half of its places busy, every second request a stream. Each drill is done again and
again; a killed raylet costs a cluster. Exits with 1 when a request failed that should not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.clusters import started
from tests.serve_apps.drills import DRILLS, THREE_WORKERS, Report, run_drill, staged


def batches(kinds: Sequence[str], repeats: int) -> Iterator[tuple[list[str], int]]:
    """Drills that may follow one another on one stage, and how often all of them are done."""
    for _, alike in groupby(kinds, key=lambda kind: (id(DRILLS[kind].app), DRILLS[kind].costs_node)):
        group = list(alike)
        if DRILLS[group[0]].costs_node:
            yield from ((group, 1) for _ in range(repeats))
        else:
            yield group, repeats


def measure(kinds: Sequence[str], repeats: int) -> Iterator[Report]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for number, (group, times) in enumerate(batches(kinds, repeats)):
            place = directory / str(number)
            app = DRILLS[group[0]].app
            with started(place, *THREE_WORKERS) as cluster, staged(cluster, app, place / "model") as stage:
                for _ in range(times):
                    for kind in group:
                        report = run_drill(kind, stage)
                        print(line(report), file=sys.stderr, flush=True)
                        yield report


def line(report: Report) -> str:
    counts = {name: value for name, value in vars(report).items() if name not in ("kind", "failed")}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in counts.items() if value is not None)
    failed = "".join(f"\n    failed: {seen}" for seen in report.failed)
    return f"{report.kind}: {shown}, failed {len(report.failed)}{failed}"


def spread(seconds: Sequence[float]) -> str:
    """The median and the worst."""
    return f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "—"


def table(reports: Sequence[Report]) -> list[str]:
    """Markdown: the sums over the repeats, and the median and the worst time until capacity is back."""
    rows = [
        "| what | drills | requests | in flight there | retried | ended with an error event | broken |"
        " failed | gone after (median, worst) | another given requests after | back after (median, worst) |"
        " longest answer |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in dict.fromkeys(report.kind for report in reports):
        mine = [report for report in reports if report.kind == kind]
        sums = [
            sum(getattr(r, name) for r in mine)
            for name in ("requests", "in_flight", "retried", "ended", "broken")
        ]
        failed = sum(len(report.failed) + report.wrong for report in mine)
        gone = [report.gone_s for report in mine if report.gone_s is not None]
        taken = [report.taken_s for report in mine if report.taken_s is not None]
        back = [report.back_s for report in mine]
        rows.append(
            f"| {kind} | {len(mine)} | {' | '.join(str(n) for n in sums)} | {failed} | "
            f"{spread(gone)} | {spread(taken)} | {spread(back)} | {max(r.longest_s for r in mine):.1f} s |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", action="append", choices=list(DRILLS), metavar="KIND", default=None)
    options = parser.parse_args()
    reports = list(measure(options.only or list(DRILLS), options.repeats))
    if options.json:
        documents: list[dict[str, Any]] = [asdict(report) for report in reports]
        print(json.dumps(documents))
    else:
        print("\n".join(table(reports)))
    sys.exit(any(not report.ok for report in reports))


if __name__ == "__main__":
    main()
