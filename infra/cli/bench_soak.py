"""Benchmarks from the command line: `bench soak`."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.common import JsonOption, print_json, say

if TYPE_CHECKING:
    from infra.lab.soak.soak import SoakReport


def soak(
    minutes: Annotated[float, typer.Option(min=2, help="Minutes of faults and load.")] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the faults and the load.")] = 0,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--faults", help="Only these, e.g. kill_rank,kill_broker. Default: all.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train and serve under random faults and load, on a cluster of its own; nothing may be lost."""
    from cluster.errors import RequestError
    from infra.lab.soak.plan import FAULTS
    from infra.lab.soak.soak import Soak

    chosen = tuple(FAULTS) if kinds is None else tuple(each.strip() for each in kinds.split(","))
    if unknown := [each for each in chosen if each not in FAULTS]:
        raise RequestError(f"--faults {', '.join(unknown)}: should be among {', '.join(FAULTS)}")
    # Ray tells whoever has deployed an app, on standard output, of every process that is killed.
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        report = Soak(minutes, seed, say, chosen).run()
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: SoakReport) -> None:
    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"

    print(f"seed {report.seed}, {report.minutes:g} minutes")
    print(f"faults: {listed(report.faults)}; nobody to hit: {listed(report.missed)}")
    print(f"jobs: {listed(report.jobs)}, in {report.attempts} attempts, resized {report.resized} times")
    print(f"steps: {report.steps}, done again from a checkpoint: {report.steps_done_again}")
    print(f"requests under {report.rises} rises of load: {listed(report.requests)}")
    for reason, count in report.reasons.items():
        print(f"  {count} x {reason}")
    print("\n".join(["wrong:", *report.wrong]) if report.wrong else "nothing was lost")
