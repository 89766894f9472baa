"""Benchmarks from the command line: `bench sharing`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.common import JsonOption, print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infra.simulator.report import Figures

_TRACE = "The trace"
_CLUSTER = "The cluster and its serving load"


def sharing(
    simulate: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="TRACE",
            help="A trace of jobs: Shoal's CSV, a job log of Philly, a list of pods of Alibaba (2023), or"
            " philly:SEED, which is generated.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option("--policy", help="Policies, side by side; the first is compared with.")
    ] = "fixed,serving-first,shoal",
    seed: Annotated[int, typer.Option(min=0, help="Of the load, of failures, and of what is generated.")] = 0,
    days: Annotated[
        float, typer.Option(min=0.01, max=1000, help="Days of a generated trace.", rich_help_panel=_TRACE)
    ] = 7.0,
    load: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=100,
            help="What generated jobs compute, over what the devices outside serving's share can.",
            rich_help_panel=_TRACE,
        ),
    ] = 0.8,
    elastic: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Part of the jobs that are elastic; not of Shoal's CSV.",
            rich_help_panel=_TRACE,
        ),
    ] = 0.5,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write-trace",
            metavar="CSV",
            help="Write the jobs as Shoal's CSV.",
            show_default=False,
            rich_help_panel=_TRACE,
        ),
    ] = None,
    devices: Annotated[
        str, typer.Option(help="How many, or by kind: H100-SXM:64,A100-SXM:32.", rich_help_panel=_CLUSTER)
    ] = "64",
    node_devices: Annotated[
        int, typer.Option(min=1, max=1024, help="Devices of a node.", rich_help_panel=_CLUSTER)
    ] = 8,
    serving_share: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Part of the devices that serving's peak needs.", rich_help_panel=_CLUSTER
        ),
    ] = 0.5,
    apps: Annotated[int, typer.Option(min=1, max=1000, help="Serving apps.", rich_help_panel=_CLUSTER)] = 2,
    tensor: Annotated[int, typer.Option(min=1, help="Devices of a replica.", rich_help_panel=_CLUSTER)] = 2,
    reserve: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Part of the devices that the minimums of jobs leave to serving, in the policy shoal.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0.0,
    mtbf: Annotated[
        float | None,
        typer.Option(
            "--node-mtbf-h",
            min=0.01,
            help="Hours between two failures of a node, on average. Default: none fails.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    costs_file: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="YAML or JSON of what changes of devices cost.",
            show_default=False,
        ),
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option("--cost", metavar="NAME=VALUE", help="Change one of them.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare ways of sharing one cluster, in simulated time under the real allocation."""
    from cluster.errors import RequestError

    if simulate is None:
        raise RequestError(
            "shoal bench sharing needs --simulate TRACE: a file of jobs, or philly:SEED to make them up"
        )
    from infra.simulator.costs import costs_of
    from infra.simulator.generator import Recipe
    from infra.simulator.load import apps_for
    from infra.simulator.occupancy import cluster_of
    from infra.simulator.policies import policy_of
    from infra.simulator.report import document, figures
    from infra.simulator.simulation import Rules, Simulation
    from infra.simulator.source import trace_of
    from infra.simulator.trace_csv import write_csv

    names = _names(policies)
    kinds = _kinds(devices)
    total = sum(count for _, count in kinds)
    serving = round(total * serving_share)
    if serving and serving < apps * tensor:
        raise RequestError(
            f"--serving-share {serving_share:g} of {total} devices is {serving}, too few for {apps} apps with"
            f" replicas of {tensor}"
        )
    if serving and tensor > node_devices:
        raise RequestError(f"--tensor {tensor}: a replica is on one node, which has {node_devices} devices")
    costs_text = None
    if costs_file is not None:
        try:
            costs_text = costs_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{costs_file} cannot be read: {error}") from error
    costs = costs_of(costs_text, str(costs_file), cost or ())
    recipe = Recipe(
        seed, days, load, total - serving, cluster=total, elastic=elastic, node_devices=node_devices
    )
    trace = trace_of(simulate, recipe)
    for sentence in trace.left_out:
        say(f"{trace.source}: {sentence}")
    if write is not None:
        try:
            write.write_text(write_csv(trace.jobs))
        except OSError as error:
            raise RequestError(f"{write} cannot be written: {error.strerror or error}") from error
    nodes = cluster_of(kinds, node_devices)
    load_of = apps_for(serving, apps, tensor) if serving else []
    rules = Rules(node_mtbf_s=None if mtbf is None else mtbf * 3600)
    # All of them are checked before the first one starts.
    simulations = [
        Simulation(
            trace, load_of, nodes, policy_of(name, nodes, serving, round(total * reserve)), costs, rules, seed
        )
        for name in names
    ]
    rows: list[Figures] = []
    for simulation in simulations:
        began = time.perf_counter()
        rows.append(figures(simulation.run()))
        say(f"{rows[-1].policy}: {rows[-1].decisions:,} decisions in {time.perf_counter() - began:.1f} s")
    facts: dict[str, Any] = {
        "trace": trace.source,
        "jobs": len(trace.jobs),
        "left_out": list(trace.left_out),
        "span_s": trace.span_s,
        "device_seconds": trace.device_seconds,
        "devices": total,
        "nodes": len(nodes),
        "serving_devices": serving,
        "apps": len(load_of),
        "tensor": tensor,
        "reserve": reserve,
        "seed": seed,
        "costs": costs.as_json(),
        "costs_from": costs.sources(),
        "rules": vars(rules),
    }
    if as_json:
        print_json(document(facts, rows))
    else:
        _print_table(facts, rows)


def _names(text: str) -> list[str]:
    from cluster.errors import RequestError
    from infra.simulator.policies import NAMES

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise RequestError(f"--policy {text}: there is no policy {name!r}; there are {', '.join(NAMES)}")
    if len(set(names)) < len(names):
        raise RequestError(f"--policy {text}: names one of them twice")
    return names


def _kinds(text: str) -> list[tuple[str | None, int]]:
    from cluster.errors import RequestError

    kinds: list[tuple[str | None, int]] = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":")
        if not (count.isascii() and count.isdigit()) or not 0 < int(count) <= 1_000_000:
            raise RequestError(
                f"--devices {text}: should be a whole number above 0, or some by kind as"
                " H100-SXM:64,A100-SXM:32"
            )
        kinds.append((name or None, int(count)))
    return kinds


def _print_table(facts: dict[str, Any], rows: Sequence[Figures]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from infra.simulator.report import table

    console = Console()
    console.print(
        f"Simulated: {facts['jobs']:,} jobs of {facts['trace']} in {facts['span_s'] / 86_400:.1f} days on"
        f" {facts['devices']:,} devices, serving's peak needs {facts['serving_devices']:,}",
        highlight=False,
    )
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("", no_wrap=True)
    for row in rows:
        shown.add_column(row.policy, no_wrap=True, justify="right")
    for line in table(rows):
        shown.add_row(*line)
    console.print(shown)
    values = ", ".join(f"{name} {value:g}" for name, value in facts["costs"].items())
    console.print(f"Assumed: {values}", highlight=False)
