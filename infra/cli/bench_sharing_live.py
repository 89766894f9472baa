"""`bench sharing` without --simulate: the measurement and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infra.cli.common import print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence


def live(rounds: int, *, as_json: bool) -> None:
    """Measure, and show what came out.

    Raises:
        ShoalError: a request failed, or a step was lost or repeated; after the figures were shown.
    """
    from cluster.errors import ShoalError
    from infra.lab.bench.sharing import measure
    from infra.lab.bench.sharing_report import document

    found = document(*measure(rounds, say))
    if as_json:
        print_json(found)
    else:
        _print_tables(found)
    if not found["ok"]:
        raise ShoalError("\n".join(found["problems"]))


def _print_tables(found: dict[str, Any]) -> None:
    from rich.console import Console

    from cluster.wording import counted
    from infra.lab.bench.sharing_report import course_table, table

    console = Console()
    console.print(
        f"Measured: {counted(len(found['rounds']), 'round')} of rising and falling load,"
        f" {counted(found['cores'], 'core')}",
        highlight=False,
    )
    console.print(_table(("", "median", "worst"), course_table(found)))
    console.print(_table(("", "sharing", "fixed split"), table(found)))
    rates = found["undisturbed_samples_per_s"].items()
    shown = ", ".join(f"{rate:,.1f} with {counted(int(workers), 'worker')}" for workers, rate in rates)
    console.print(f"Without a load the elastic job trains, in samples/s: {shown}", highlight=False)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        shown.add_column(heading, no_wrap=True, justify="left" if not heading else "right")
    for row in rows:
        shown.add_row(*row)
    return shown
