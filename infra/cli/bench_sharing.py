"""Benchmarks from the command line: `bench sharing`; without --simulate see `bench_sharing_live`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.common import JsonOption, print_json, say

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from infra.lab.simulator.costs import Costs
    from infra.lab.simulator.jobs import Trace
    from infra.lab.simulator.outcome import Figures

_SIMULATION = "With --simulate"
_TRACE = "With --simulate: the trace"
_CLUSTER = "With --simulate: the cluster and its serving load"
_MEASURED = "Without --simulate"
_OF_MEASUREMENTS = {"rounds", "shape", "minutes", "paced"}
_ALWAYS = {"simulate", "as_json", "devices"}


def sharing(
    context: typer.Context,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Rises and falls of the load.", rich_help_panel=_MEASURED)
    ] = 10,
    shape: Annotated[
        str,
        typer.Option(
            "--shape",
            help="The load: steps (--rounds), or, with --paced, day or bursts.",
            rich_help_panel=_MEASURED,
        ),
    ] = "steps",
    minutes: Annotated[
        float,
        typer.Option(
            min=1,
            max=1440,
            help="How long day or bursts last; a day goes by in it.",
            rich_help_panel=_MEASURED,
        ),
    ] = 24.0,
    paced: Annotated[
        bool,
        typer.Option(
            "--paced",
            help="Devices do not compete for cores: ranks and engines wait where devices would compute.",
            rich_help_panel=_MEASURED,
        ),
    ] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="TRACE",
            help="Measure nothing, and simulate a trace of jobs: Shoal's CSV, a job log of Philly, a list of"
            " pods of Alibaba (2023), or philly:SEED, which is generated.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policy",
            help="Policies, side by side; the first is compared with.",
            rich_help_panel=_SIMULATION,
        ),
    ] = "fixed,serving-first,shoal",
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of the load, of failures, and of what is generated.",
            rich_help_panel=_SIMULATION,
        ),
    ] = 0,
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
        str | None,
        typer.Option(
            help="How many (default: 64, and 4 without --simulate), or by kind: H100-SXM:64,A100-SXM:32.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
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
            rich_help_panel=_SIMULATION,
        ),
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            "--cost",
            metavar="NAME=VALUE",
            help="Change one of them.",
            show_default=False,
            rich_help_panel=_SIMULATION,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how devices change hands under load, on a cluster of its own; or simulate ways of sharing.

    Without --simulate a small cluster is started, on which an elastic job gives devices to an app whose load
    rises, and takes them back when it falls; then the same load comes on a fixed split. Exit code 1 if a
    request failed, or a step was lost or repeated.
    """
    given = {
        option.name: option.opts[0] for option in context.command.params if _is_given(context, option.name)
    }
    if simulate is None:
        from infra.cli.bench_sharing_live import live, plan_of

        _refuse(
            given.keys() - _OF_MEASUREMENTS - _ALWAYS,
            given,
            "needs --simulate TRACE: a measurement has no such option",
        )
        live(plan_of(shape, rounds, minutes, paced, devices, set(given)), as_json=as_json)
        return
    _refuse(given.keys() & _OF_MEASUREMENTS, given, "is of a measurement, which --simulate is none")
    from infra.lab.simulator.comparison import Setup, compare
    from infra.lab.simulator.outcome import document
    from infra.lab.simulator.simulation import Rules
    from infra.lab.simulator.source import trace_of

    setup = Setup(
        _kinds(devices or "64"),
        node_devices,
        serving_share,
        apps,
        tensor,
        reserve,
        _names(policies),
        _costs(costs_file, cost or ()),
        Rules(node_mtbf_s=None if mtbf is None else mtbf * 3600),
        seed,
    )
    trace = trace_of(simulate, setup.recipe(days, load, elastic))
    for sentence in trace.left_out:
        say(f"{trace.source}: {sentence}")
    if write is not None:
        _write(trace, write)
    rows = compare(trace, setup, say)
    if as_json:
        print_json(document(setup.facts(trace), rows))
    else:
        _print_table(setup.facts(trace), rows)


def _refuse(names: Collection[str], options: Mapping[str, str], why: str) -> None:
    from cluster.errors import RequestError

    for name in options:
        if name in names:
            raise RequestError(f"{options[name]} {why}")


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name) if name else None
    return source is not None and source.name == "COMMANDLINE"


def _names(text: str) -> list[str]:
    from cluster.errors import RequestError
    from infra.lab.simulator.policies import NAMES

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


def _costs(file: Path | None, settings: Sequence[str]) -> Costs:
    from cluster.errors import RequestError
    from infra.lab.simulator.costs import costs_of

    text = None
    if file is not None:
        try:
            text = file.read_text()
        except OSError as error:
            raise RequestError(f"{file} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise RequestError(f"{file} is no text in UTF-8: byte {error.start + 1} is not") from error
    return costs_of(text, str(file), settings)


def _write(trace: Trace, target: Path) -> None:
    from cluster.errors import RequestError
    from infra.lab.simulator.trace_csv import write_csv

    try:
        target.write_text(write_csv(trace.jobs))
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror or error}") from error


def _print_table(facts: dict[str, Any], rows: Sequence[Figures]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from infra.lab.simulator.outcome import table

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
