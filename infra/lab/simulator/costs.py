"""What changing hands costs: seconds and rates that the simulation assumes, each with where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any

from cluster.config.reading.positions import Position
from cluster.config.reading.sentences import listed, nearest, show_value
from cluster.config.reading.yaml_reader import read_yaml
from cluster.errors import ConfigError, Mistake, RequestError

SETTING = "--cost"


def _cost(default: float, meaning: str, source: str) -> Any:
    return field(default=default, metadata={"meaning": meaning, "source": source})


@dataclass(frozen=True)
class Costs:
    """Durations in seconds; change them by `--costs FILE` and `--cost NAME=VALUE`."""

    start_s: float = _cost(
        1.1,
        "from the grant of a group to its first step; the groups that run do not wait for it",
        "measured: 1.0-1.6 s where a worker of an earlier group stands by, on two cores; 10-13 s without one",
    )
    join_pause_s: float = _cost(
        0.12,
        "how long the groups of a job stand when others join",
        "measured: 0.12 s (median of ten)",
    )
    leave_s: float = _cost(
        1.3,
        "until a group that gives way has left: it ends its step, and its processes end",
        "measured: 0.3 s beyond the step; that a step takes 1 s is an assumption",
    )
    kill_s: float = _cost(
        0.3,
        "until the devices of a job that is stopped as a whole are free",
        "measured: 0.3 s after ray.kill of a group's actor",
    )
    kill_pause_s: float = _cost(
        2.4,
        "how long the groups of a job stand when the node of another is lost",
        "measured: 2.4 s after SIGKILL of its raylet (median of ten), of which 2 s are the heartbeat timeout",
    )
    restart_s: float = _cost(
        6.6,
        "from the grant of a job that was stopped as a whole to its first step",
        "measured: 6.6 s on a spare node after one was lost",
    )
    checkpoint_every_s: float = _cost(
        1800.0,
        "between two checkpoints of a job; what came after the last is lost when all of it stops",
        "assumption",
    )
    replica_start_s: float = _cost(
        1.0,
        "from the grant of a replica to its first answer",
        "measured: 1.0 s for a tiny model beside training on two cores, 0.1 s where its engine is parked;"
        " vLLM on a CPU: 4.3 s",
    )
    replica_drain_s: float = _cost(
        2.6,
        "until a replica that is not wanted has answered what it has, and its devices are free",
        "measured: 2.6 s with answers of 48 tokens",
    )
    doubling: float = _cost(
        0.95,
        "of twice as many groups, the part of twice the speed that comes of it",
        "assumption; several groups were measured at 0.97 of one and more, on one machine",
    )
    decide_every_s: float = _cost(
        1.0,
        "between two decisions at least; what changes meanwhile is decided together",
        "the broker looks at its nodes once a second",
    )

    def speed(self, groups: int) -> float:
        """How many times as fast as one group so many are: groups ** (1 + log2(doubling))."""
        return groups ** (1.0 + math.log2(self.doubling)) if groups else 0.0

    def sources(self) -> dict[str, str]:
        """Where each value comes from, as long as it was not changed."""
        return {
            entry.name: entry.metadata["source"] if getattr(self, entry.name) == entry.default else "given"
            for entry in fields(self)
        }

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def costs_of(text: str | None, file: str, settings: Sequence[str] = ()) -> Costs:
    """The costs with what a file (a YAML or JSON mapping) and `NAME=VALUE` settings change.

    Raises:
        ConfigError: with every mistake of the file.
        RequestError: a setting is wrong.
    """
    costs = Costs()
    if text is not None:
        document = read_yaml(text, Position(file))
        mistakes = list(document.mistakes)
        if not isinstance(document.root.value, Mapping):
            given = show_value(document.root.plain())
            raise ConfigError([Mistake(file, 1, 1, "", given, f"should be a mapping of costs, was {given}")])
        changes = {}
        for name, entry in document.root.value.items():
            given = entry.item.plain()
            wrong = _wrong_name(name) or _wrong_value(name, given)
            if wrong is None:
                changes[name] = float(given)
            else:
                mistakes.append(Mistake(file, entry.place.line, entry.place.column, name, given, wrong))
        if mistakes:
            raise ConfigError(mistakes)
        costs = replace(costs, **changes)
    for setting in settings:
        name, given_sign, value = setting.partition("=")
        wrong = _wrong_name(name) if given_sign else "should be NAME=VALUE"
        if wrong is None:
            wrong = _wrong_value(name, _number(value))
        if wrong is not None:
            raise RequestError(f"{SETTING} {setting}: {wrong}")
        costs = replace(costs, **{name: float(value)})
    return costs


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _wrong_name(name: str) -> str | None:
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(Costs)}
    if name in known:
        return None
    guess = nearest(name, known)
    hint = "" if guess is None else f"; did you mean `{guess}`?"
    return f"unknown cost {show_value(name)}{hint} (known: {listed(known)})"


def _wrong_value(name: str, value: Any) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if name == "doubling":
        right, allowed = number and 0.5 < value <= 1, "above 0.5, at most 1"
    elif name == "checkpoint_every_s":
        right, allowed = number and value > 0, "seconds, above 0"
    else:
        right, allowed = number and value >= 0, "seconds, at least 0"
    return None if right else f"should be {allowed}, was {show_value(value)}"
