"""`bench sharing` without --simulate: the measurement and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infra.cli.common import print_json, say

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from infra.lab.bench.sharing_plan import SharingPlan

MOST_DEVICES = 16
"""Of a measurement: each has a process, and all are on one machine."""


def plan_of(
    shape: str, rounds: int, minutes: float, paced: bool, devices: str | None, given: Collection[str | None]
) -> SharingPlan:
    """What the options ask for.

    Args:
        given: the names of those that were given.

    Raises:
        RequestError: they do not fit together.
    """
    from cluster.errors import RequestError
    from infra.lab.bench.sharing_plan import LOADS, STEPS, SharingPlan

    if shape not in LOADS:
        raise RequestError(f"--shape {shape}: there is no such load; there are {', '.join(LOADS)}")
    if shape == STEPS and "minutes" in given:
        raise RequestError("--minutes is of other loads: steps take as long as devices take to change hands")
    if shape != STEPS and "rounds" in given:
        raise RequestError(f"--rounds is of the load steps, and not of {shape}")
    if shape != STEPS and not paced:
        raise RequestError(f"--shape {shape} needs --paced: without it what a replica can do is not known")
    number = devices or "4"
    if not (number.isascii() and number.isdigit()) or int(number) % 2 or not 4 <= int(number) <= MOST_DEVICES:
        raise RequestError(
            f"--devices {devices}: without --simulate it is an even number from 4 to {MOST_DEVICES}"
        )
    if not paced and int(number) != 4:
        raise RequestError(f"--devices {devices} needs --paced: as they are, four compete for cores already")
    return SharingPlan(rounds, shape, minutes, paced, int(number))


def live(plan: SharingPlan, *, as_json: bool) -> None:
    """Measure, and show what came out.

    Raises:
        ShoalError: a request failed, or a step was lost or repeated; after the figures were shown.
    """
    from cluster.errors import ShoalError
    from infra.lab.bench.sharing import measure
    from infra.lab.bench.sharing_report import document

    found = document(plan, measure(plan, say))
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
    from infra.lab.bench.side import CALLED

    console = Console()
    plan = found["plan"]
    on = f"{plan['devices']} devices" + (" that keep a pace of their own" if plan["paced"] else "")
    console.print(
        f"Measured: {_load_of(found)} on {on}, {counted(found['cores'], 'core')}",
        highlight=False,
    )
    console.print(_table(("", "median", "worst"), course_table(found)))
    console.print(_table(("", *(CALLED[side] for side in found["sides"])), table(found)))
    gain = found["training_gain"]
    if gain["at_best"] is not None:
        console.print(
            f"Sharing trained {gain['measured']:.2f} times the samples of the fixed split; replicas that came"
            f" and went with the load, at once, would leave {gain['at_best']:.2f} times the workers",
            highlight=False,
        )
    rates = found["undisturbed_samples_per_s"].items()
    shown = ", ".join(f"{rate:,.1f} with {counted(int(workers), 'worker')}" for workers, rate in rates)
    console.print(f"Without a load the elastic job trains, in samples/s: {shown}", highlight=False)


def _load_of(found: Mapping[str, Any]) -> str:
    from cluster.wording import counted

    plan = found["plan"]
    if found["rounds"]:
        return f"{counted(len(found['rounds']), 'round')} of rising and falling load"
    what = "a day" if plan["load"] == "day" else plan["load"]
    return f"{what} in {plan['minutes']:g} minutes"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        shown.add_column(heading, no_wrap=True, justify="left" if not heading else "right")
    for row in rows:
        shown.add_row(*row)
    return shown
