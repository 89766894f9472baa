"""Benchmarks from the command line: `bench faults`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.common import INTERRUPTED, JsonOption, print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infra.lab.faults.trials import FaultRow


def faults(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Scenarios; all unless some are named.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each fault is done.")] = 10,
    listing: Annotated[bool, typer.Option("--list", help="Name the scenarios, and start nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Break things for real, on a cluster of its own, and measure how jobs go on."""
    from infra.lab.faults.trials import chosen, document, run

    scenarios = chosen(names or ())
    if listing:
        listed = [
            {
                "name": each.name,
                "what": each.what,
                "skipped": each.missing(),
                "cluster": each.use.name.lower(),
            }
            for each in scenarios
        ]
        if as_json:
            print_json(listed)
            return
        for each in listed:
            left_out = f" (not here: {each['skipped']})" if each["skipped"] else ""
            typer.echo(f"{each['name']}: {each['what']}{left_out}")
        return
    rows: list[FaultRow] = []
    interrupted = False
    with redirect_stdout(sys.stderr):  # Ray prints there that its nodes have died
        try:
            for row in run(scenarios, repeats, say):
                rows.append(row)
        except KeyboardInterrupt:
            if not rows:
                raise
            interrupted = True
    if as_json:
        print_json(document(rows, repeats))
    else:
        _print_table(rows)
    if interrupted:  # hours may lie behind it: what they gave is printed
        say(f"interrupted after {len(rows)} of {len(scenarios)} scenarios")
        raise typer.Exit(INTERRUPTED)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def _print_table(rows: Sequence[FaultRow]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from infra.lab.faults.trials import HEADINGS, table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    words = {"scenario", "from", "class"}
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading in words else "right")
    for line in table(rows):
        shown.add_row(*line)
    console = Console()
    console.print(shown)
    console.print("Seconds from the fault: to the next step (median, worst); until the job said so (median).")
    for row in rows:
        for sentence in row.outcome.wrong if row.outcome else ():
            console.print(f"{row.scenario.name}: {sentence}", markup=False, highlight=False)
