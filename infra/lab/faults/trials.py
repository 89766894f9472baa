"""Runs scenarios in turn, and says what came of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.errors import RequestError, ShoalError
from infra.lab.faults.laboratory import Laboratory
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios import SCENARIOS


@dataclass(frozen=True)
class FaultRow:
    """A scenario and what came of it; without an `outcome` where it could not be done, and why."""

    scenario: Scenario
    outcome: FaultOutcome | None
    missing: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong; also of what could not be done here."""
        return self.outcome is None or not self.outcome.wrong


def chosen(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names, all by default; those that share a cluster follow one another.

    Raises:
        RequestError: there is none of a name.
    """
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise RequestError(f"there is no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    wanted = [SCENARIOS[name] for name in names] or list(SCENARIOS.values())
    return sorted(wanted, key=lambda scenario: scenario.use)


def run(scenarios: Sequence[Scenario], repeats: int, say: Callable[[str], None]) -> Iterator[FaultRow]:
    """Do each of them so many times. One that goes wrong does not keep the others from being done."""
    with Laboratory(say) as lab:
        for scenario in scenarios:
            missing = scenario.missing()
            if missing is not None:
                say(f"{scenario.name} is left out: {missing}")
                yield FaultRow(scenario, None, missing)
                continue
            say(f"{scenario.name}: {scenario.what}")
            try:
                outcome = scenario.run(lab, repeats)
            except ShoalError as error:
                outcome = FaultOutcome([], [str(error)])
                lab.down()  # who knows what is left of it
            for trial in outcome.trials:
                say(f"{scenario.name}: {sentence_of(trial)}")
            for sentence in outcome.wrong:
                say(f"{scenario.name}: {sentence}")
            yield FaultRow(scenario, outcome)


def sentence_of(trial: Trial) -> str:
    """What came of one fault."""
    parts = [f"{trial.seconds:.1f} s"]
    if trial.found_s is not None:
        parts.append(f"found after {trial.found_s:.1f} s")
    if trial.failure is not None:
        parts.append("{failure_class}, rank {rank} on {node}".format(**trial.failure))
    parts += [f"from {trial.state}", f"{trial.repeated} steps again", trial.seen]
    return "; ".join(part for part in parts if part)


HEADINGS = ("scenario", "next step", "worst", "of", "found", "bar", "from", "again", "class")


def table(rows: Sequence[FaultRow]) -> list[tuple[str, ...]]:
    """One row a scenario, by HEADINGS; times in seconds, medians but for the worst."""
    found = []
    for row in rows:
        if row.outcome is None or not row.outcome.trials:
            found.append((row.scenario.name, row.missing or "failed", *[""] * (len(HEADINGS) - 2)))
            continue
        trials, bar = row.outcome.trials, row.outcome.bar_s
        times = [trial.seconds for trial in trials]
        said = [trial.found_s for trial in trials if trial.found_s is not None]
        classes = [trial.failure["failure_class"] for trial in trials if trial.failure is not None]
        repeated = [trial.repeated for trial in trials]
        found.append(
            (
                row.scenario.name,
                f"{statistics.median(times):.1f}",
                f"{max(times):.1f}",
                str(len(times)),
                f"{statistics.median(said):.1f}" if said else "",
                "" if bar is None else f"{bar:.1f}",
                _most_common([trial.state for trial in trials]),
                str(max(repeated)),
                _most_common(classes),
            )
        )
    return found


def document(rows: Sequence[FaultRow], repeats: int) -> dict[str, Any]:
    """What `shoal bench faults --json` prints."""
    return {
        "repeats": repeats,
        "ok": all(row.ok for row in rows),
        "scenarios": [_as_json(row) for row in rows],
    }


def _as_json(row: FaultRow) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": row.scenario.name, "what": row.scenario.what, "skipped": row.missing}
    if row.outcome is None:
        return facts
    times = [trial.seconds for trial in row.outcome.trials]
    return {
        **facts,
        "median_s": statistics.median(times) if times else None,
        "worst_s": max(times, default=None),
        "bar_s": row.outcome.bar_s,
        "wrong": row.outcome.wrong,
        "trials": [asdict(trial) for trial in row.outcome.trials],
    }


def _most_common(words: Sequence[str]) -> str:
    counted = Counter(words).most_common()
    if len(counted) < 2:
        return counted[0][0] if counted else ""
    return ", ".join(f"{word} ({count})" for word, count in counted)
