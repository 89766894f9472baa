"""The scaling table as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.errors import RequestError
from infra.lab.bench.scaling import ScalingRow


def draw(rows: Sequence[ScalingRow], unit: str, title: str, target: Path) -> None:
    """Write a PNG: throughput over workers, a line a strategy, beside a straight line from the first.

    Raises:
        RequestError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError("a plot needs matplotlib: pip install 'shoal[bench]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for strategy in dict.fromkeys(row.strategy for row in rows):
        mine = sorted((row for row in rows if row.strategy == strategy), key=lambda row: row.workers)
        workers, rates = [row.workers for row in mine], [row.rate for row in mine]
        low = [row.rate - row.spread[0] for row in mine]
        high = [row.spread[1] - row.rate for row in mine]
        (line, *_) = axes.errorbar(workers, rates, yerr=[low, high], marker="o", capsize=3, label=strategy)
        ideal = [rates[0] * count / workers[0] for count in workers]
        axes.plot(workers, ideal, linestyle=":", color=line.get_color())
    axes.set(xlabel="workers", ylabel=f"{unit}/s", title=title)
    axes.set_xticks(sorted({row.workers for row in rows}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(target, format="png", dpi=150)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror or error}") from error
