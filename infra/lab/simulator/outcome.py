"""What came out, as figures: waiting, completion and use of the devices; policies side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from infra.lab.simulator.simulation import SimulationOutcome
from infra.lab.simulator.training import Spent


@dataclass(frozen=True)
class Times:
    """Seconds of many jobs; None where there was none."""

    mean_s: float | None
    median_s: float | None
    p95_s: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        if not seconds:
            return cls(None, None, None)
        p95 = float(np.percentile(seconds, 95))
        return cls(math.fsum(seconds) / len(seconds), float(np.median(seconds)), p95)


@dataclass(frozen=True)
class Figures:
    """The figures of one policy.

    Attributes:
        queuing: from the submission of a job to its first devices.
        completion: from its submission to its end.
        unfinished: jobs that were not done when the simulation gave up; they are in no time above.
        use: parts of all device-seconds from the start to the last submission, by what they went into.
        allocated: the part of them that somebody had.
        lost: part of all computing of jobs that was lost and done again.
        requests_missed: part of the requests beyond what the ready replicas answer within the service level.
        short: part of the time in which an app missed requests, on average over the apps.
    """

    policy: str
    jobs: int
    unfinished: int
    queuing: Times
    completion: Times
    use: Mapping[str, float]
    allocated: float
    lost: float
    preemptions: int
    resizes: int
    failures: int
    requests: float
    requests_missed: float
    short: float
    decisions: int
    end_s: float


def figures(outcome: SimulationOutcome) -> Figures:
    """The figures of one outcome."""
    runs = outcome.runs
    granted = [run.granted_at - run.job.submit_s for run in runs if run.granted_at is not None]
    ended = [run.finished_at - run.job.submit_s for run in runs if run.finished_at is not None]
    use = _parts(outcome.window)
    spent = outcome.spent
    requests = math.fsum(app.requests for app in outcome.apps)
    return Figures(
        outcome.policy,
        len(runs),
        unfinished=len(runs) - len(ended),
        queuing=Times.of(granted),
        completion=Times.of(ended),
        use=use,
        allocated=1.0 - use["idle"] - use["down"],
        lost=spent.lost / (spent.lost + spent.training) if spent.training else 0.0,
        preemptions=sum(run.preemptions for run in runs),
        resizes=sum(run.resizes for run in runs),
        failures=sum(run.failures for run in runs),
        requests=requests,
        requests_missed=math.fsum(app.missed for app in outcome.apps) / requests if requests else 0.0,
        short=math.fsum(app.short_s for app in outcome.apps) / (len(outcome.apps) * outcome.window_s or 1.0),
        decisions=outcome.decisions,
        end_s=outcome.end_s,
    )


def _parts(spent: Spent) -> dict[str, float]:
    total = spent.total() or 1.0
    return {name: value / total for name, value in vars(spent).items()}


def ratios(rows: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
    """How many times less each policy waits and takes, and how much more it uses, than the first one."""
    base = rows[0]

    def over(before: float | None, now: float | None) -> float | None:
        return before / now if before is not None and now else None

    return {
        row.policy: {
            "queuing_mean": over(base.queuing.mean_s, row.queuing.mean_s),
            "completion_mean": over(base.completion.mean_s, row.completion.mean_s),
            "completion_median": over(base.completion.median_s, row.completion.median_s),
            "allocated": over(row.allocated, base.allocated),
        }
        for row in rows
    }


def document(facts: Mapping[str, Any], rows: Sequence[Figures]) -> dict[str, Any]:
    """What `shoal bench sharing --simulate` prints as JSON: what was assumed, and what came out."""
    return {
        **facts,
        "policies": [asdict(row) for row in rows],
        "against": rows[0].policy,
        "ratios": ratios(rows),
    }


def table(rows: Sequence[Figures]) -> list[list[str]]:
    """Lines of a name and a text for each policy."""
    times_less = ratios(rows)

    def ratio(name: str) -> list[str]:
        values = [times_less[row.policy][name] for row in rows]
        return ["-" if value is None else f"{value:.2f}x" for value in values]

    lines: list[tuple[str, list[str]]] = [
        ("queuing, mean", [seconds(row.queuing.mean_s) for row in rows]),
        ("  median", [seconds(row.queuing.median_s) for row in rows]),
        ("  95 of 100 within", [seconds(row.queuing.p95_s) for row in rows]),
        ("  times less", ratio("queuing_mean")),
        ("completion, mean", [seconds(row.completion.mean_s) for row in rows]),
        ("  median", [seconds(row.completion.median_s) for row in rows]),
        ("  95 of 100 within", [seconds(row.completion.p95_s) for row in rows]),
        ("  times less", ratio("completion_mean")),
        ("devices: training", [f"{row.use['training']:.1%}" for row in rows]),
        ("  serving", [f"{row.use['serving']:.1%}" for row in rows]),
        ("  start, stand, leave", [f"{_overhead(row):.2%}" for row in rows]),
        ("  lost work", [f"{row.use['lost']:.2%}" for row in rows]),
        ("  idle", [f"{row.use['idle']:.1%}" for row in rows]),
        ("  had by somebody", [f"{row.allocated:.1%}" for row in rows]),
        ("  times more", ratio("allocated")),
        ("preemptions", [f"{row.preemptions:,}" for row in rows]),
        ("resizes", [f"{row.resizes:,}" for row in rows]),
        ("requests missed", [f"{row.requests_missed:.3%}" for row in rows]),
        ("time short of replicas", [f"{row.short:.2%}" for row in rows]),
        ("jobs not finished", [f"{row.unfinished:,}" for row in rows]),
    ]
    if any(row.use["down"] for row in rows):
        lines.insert(15, ("  down", [f"{row.use['down']:.1%}" for row in rows]))
    return [[name, *texts] for name, texts in lines]


def _overhead(row: Figures) -> float:
    return row.use["starting"] + row.use["standing"] + row.use["leaving"]


def seconds(value: float | None) -> str:
    """`47 s`, `12 min`, `3.4 h`."""
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"
