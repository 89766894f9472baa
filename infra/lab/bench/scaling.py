"""The scaling table of a training job: what more workers bring, strategy by strategy. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ScalingRun:
    """One run: who ran, and the totals that it said of itself (`totals` of a job's result)."""

    strategy: str
    workers: int
    totals: Mapping[str, Any]


@dataclass(frozen=True)
class ScalingRow:
    """The median of the runs of one strategy at one number of workers.

    Attributes:
        rate: tokens (or samples) a second, over all workers.
        spread: smallest and largest rate of the runs.
        speed_up: rate over that of the fewest workers that this strategy was run with.
        efficiency: speed-up over how many times as many workers there are.
        communication: share of a step in which a collective was in flight and nothing computed.
    """

    strategy: str
    workers: int
    runs: int
    rate: float
    spread: tuple[float, float]
    speed_up: float
    efficiency: float
    step_s: float
    communication: float | None
    data_wait: float
    mfu: float | None
    peak_memory_bytes: int


def order(strategies: Sequence[str], workers: Sequence[int], repeats: int) -> list[tuple[str, int]]:
    """The runs in turn, A B A B …: whatever else the machines do falls on all alike."""
    return [(strategy, count) for _ in range(repeats) for count in workers for strategy in strategies]


def unit_of(trials: Sequence[ScalingRun]) -> str:
    """What is counted: `tokens` or `samples`."""
    return "tokens" if trials[0].totals["tokens_per_s"] is not None else "samples"


def table(trials: Sequence[ScalingRun]) -> list[ScalingRow]:
    """One row for each strategy and number of workers, in the order in which they were first run."""
    unit = unit_of(trials)
    by_case: dict[tuple[str, int], list[ScalingRun]] = {}
    for trial in trials:
        by_case.setdefault((trial.strategy, trial.workers), []).append(trial)

    def rates(case: tuple[str, int]) -> list[float]:
        return [float(trial.totals[f"{unit}_per_s"]) for trial in by_case[case]]

    rows = []
    for strategy, workers in by_case:
        fewest = min(count for name, count in by_case if name == strategy)
        own, base = rates((strategy, workers)), rates((strategy, fewest))
        speed_up = statistics.median(own) / statistics.median(base)
        totals = [trial.totals for trial in by_case[strategy, workers]]
        rows.append(
            ScalingRow(
                strategy,
                workers,
                runs=len(own),
                rate=statistics.median(own),
                spread=(min(own), max(own)),
                speed_up=speed_up,
                efficiency=speed_up * fewest / workers,
                step_s=statistics.median(each["step_s"] for each in totals),
                communication=_median(each["communication"] for each in totals),
                data_wait=statistics.median(each["data_wait"] for each in totals),
                mfu=_median(each["mfu"] for each in totals),
                peak_memory_bytes=max(each["peak_memory_bytes"] for each in totals),
            )
        )
    return rows


def document(name: str, steps: int, trials: Sequence[ScalingRun]) -> dict[str, Any]:
    """What `shoal bench train` prints as JSON."""
    return {
        "job": name,
        "steps": steps,
        "unit": unit_of(trials),
        "peak_flops": trials[0].totals["peak_flops"],
        "peak_flops_from": trials[0].totals["peak_flops_from"],
        "rows": [asdict(row) for row in table(trials)],
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
