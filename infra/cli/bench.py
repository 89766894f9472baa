"""Benchmarks from the command line: `bench train`, and those that have files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.wording import counted
from infra.cli.bench_faults import faults
from infra.cli.bench_sharing import sharing
from infra.cli.bench_soak import soak
from infra.cli.common import (
    FileOption,
    JsonOption,
    SetOption,
    interrupt_at_sigterm,
    load,
    print_json,
    say,
)

if TYPE_CHECKING:
    from cluster.config.sections.train import TrainJobConfig
    from infra.lab.bench.scaling import ScalingRow


def register(app: typer.Typer) -> None:
    """Add the commands of this noun."""
    bench = typer.Typer(help="Measure, side by side.", no_args_is_help=True)
    bench.callback()(interrupt_at_sigterm)  # they have clusters of their own, which go with them
    bench.command("train")(train)
    bench.command("sharing")(sharing)
    bench.command("soak")(soak)
    bench.command("faults")(faults)
    app.add_typer(bench, name="bench")


def train(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A job of the config.")],
    workers: Annotated[str, typer.Option(help="Numbers of workers, e.g. 1,2,4.")] = "1,2",
    strategies: Annotated[
        str | None,
        typer.Option(help="Strategies, e.g. ddp,fsdp. Default: the job's own.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=8, help="Steps of a run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; they take turns.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the table too.", show_default=False)
    ] = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a job with several numbers of workers and strategies, and show what they bring."""
    from cluster.errors import RequestError, ShoalError

    counts = _counts(workers)
    loaded = load(file, settings, f"train_jobs.{name}")
    own = loaded.resolved.train_jobs[name].parallel.strategy
    names = [each.strip() for each in strategies.split(",")] if strategies else [own]
    # All of them are checked before the first one starts.
    configs: dict[tuple[str, int], TrainJobConfig] = {}
    for strategy in names:
        for count in counts:
            changed = [
                *(settings or ()),
                *(f"parallel.strategy={strategy}", f"workers.min={count}", f"workers.max={count}"),
                *(f"steps={steps}", f"checkpoint.every_steps={steps}", "evaluate.every_steps=null"),
                "optimizer.warmup_steps=0",
            ]
            config = load(file, changed, f"train_jobs.{name}").resolved.train_jobs[name]
            # Not by a setting: an app of the file may serve what this job publishes.
            configs[strategy, count] = config.model_copy(update={"publish": None})
    if plot is not None and not plot.absolute().parent.is_dir():
        raise RequestError(f"{plot.absolute().parent} is no directory to draw into")

    from infra.cli.submitting import submit
    from infra.cli.target import find_target
    from infra.cli.train import follow_job
    from infra.lab.bench.scaling import ScalingRun, document, order, table, unit_of

    target = find_target(file)
    trials = []
    for strategy, count in order(names, counts, repeats):
        say(f"{strategy} with {counted(count, 'worker')}")
        submitted = submit(target, name, configs[strategy, count], loaded)
        result, _ = follow_job(target.api, submitted["job"])
        if result["status"] != "succeeded" or result["totals"] is None:
            raise ShoalError(f"{strategy} with {count} workers {result['status']}: {result['error']}")
        trials.append(ScalingRun(strategy, count, result["totals"]))
    rows = table(trials)
    if plot is not None:
        from infra.lab.bench.plot import draw

        draw(rows, unit_of(trials), f"{name}, {steps} steps", plot)
    if as_json:
        print_json(document(name, steps, trials))
    else:
        _print_table(rows, unit_of(trials))


def _counts(text: str) -> list[int]:
    from cluster.errors import RequestError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RequestError(f"--workers {text!r}: should be whole numbers above 0, e.g. 1,2,4")
    return sorted({int(part) for part in parts})


def _print_table(rows: list[ScalingRow], unit: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    headings = ("strategy", "workers", f"{unit}/s", "speed-up", "effic.", "comm.", "wait", "MFU", "memory")
    for heading in headings:  # fits into 80 columns; the rest is in the JSON
        shown.add_column(heading, no_wrap=True, justify="left" if heading == "strategy" else "right")
    for row in rows:
        shown.add_row(
            row.strategy,
            str(row.workers),
            f"{row.rate:,.0f}",
            f"{row.speed_up:.2f}",
            f"{row.efficiency:.0%}",
            "" if row.communication is None else f"{row.communication:.1%}",
            f"{row.data_wait:.1%}",
            "" if row.mfu is None else f"{row.mfu:.1%}",
            f"{row.peak_memory_bytes / 1e9:.2f} GB",
        )
    Console().print(shown)
