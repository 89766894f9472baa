"""Traces as Shoal's own CSV: read with every mistake at once, and written."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config.reading.sentences import listed, nearest, show_value
from cluster.errors import ConfigError, Mistake
from infra.lab.simulator.jobs import Job, Trace, in_order

MAX_MISTAKES = 50
"""More than these are counted, not listed."""


@dataclass(frozen=True)
class Column:
    """One column of the CSV: what it may hold and what it means."""

    read: Callable[[str], Any]
    allowed: str
    meaning: str
    required: bool = False


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least or value > 10**9:
            raise ValueError(text)
        return value

    return read


def _seconds(*, positive: bool) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise ValueError(text)
        return value

    return read


def _text(text: str) -> str:
    if len(text) > 200 or not text.isprintable():
        raise ValueError(text)
    return text


COLUMNS: Mapping[str, Column] = {
    "job": Column(_text, "a name that no other line has", "the job's name", required=True),
    "submit_s": Column(
        _seconds(positive=False), "seconds, at least 0", "submitted, from the trace's start", required=True
    ),
    "duration_s": Column(
        _seconds(positive=True), "seconds, above 0", "computing time with `devices`", required=True
    ),
    "devices": Column(_whole(1), "a whole number above 0", "devices that were asked for", required=True),
    "group": Column(_whole(1), "a whole number that divides `devices`", "devices of a group; all by default"),
    "min_groups": Column(_whole(1), "a whole number above 0", "fewest groups; devices / group by default"),
    "max_groups": Column(_whole(1), "a whole number above 0", "most groups; devices / group by default"),
    "tensor": Column(_whole(1), "a whole number that divides `group`", "devices on one node; 1 by default"),
    "priority": Column(int, "a whole number", "the greater goes first; 0 by default"),
    "user": Column(_text, "a name", "whose it is; only told, never used"),
    "accelerator": Column(_text, "a kind of accelerator", "the only kind that will do; any by default"),
}


def read_csv(text: str, file: str) -> Trace:
    """The trace in a CSV of `COLUMNS`, the first line naming those that are there, in any order.

    Raises:
        ConfigError: with every mistake of the file, by line and column.
    """
    lines = text.split("\n")
    reader = csv.reader(io.StringIO(text), strict=True)
    mistakes: list[Mistake] = []
    jobs: list[Job] = []
    seen: dict[str, int] = {}
    names: list[str] = []
    try:
        names = [name.strip() for name in next(reader, [])]
        mistakes += _wrong_heading(names, file)
        if mistakes:
            raise ConfigError(mistakes)
        for row in reader:
            if not row or (len(row) == 1 and not row[0].strip()):
                continue
            line = _CsvLine(file, reader.line_num, names, row, lines[reader.line_num - 1])
            job = line.job()
            if job is not None and job.name in seen:
                line.note("job", f"should be {COLUMNS['job'].allowed}, was that of line {seen[job.name]}")
            elif job is not None:
                seen[job.name] = reader.line_num
                jobs.append(job)
            mistakes += line.mistakes
    except csv.Error as error:
        mistakes.append(Mistake(file, reader.line_num, None, "", None, f"is no CSV: {error}"))
    if not jobs and not mistakes:
        mistakes.append(Mistake(file, None, None, "", None, "holds no job"))
    if mistakes:
        raise ConfigError(_at_most(mistakes, file))
    return Trace(in_order(jobs), file)


def write_csv(jobs: Sequence[Job]) -> str:
    """The CSV that `read_csv` reads back as these jobs."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(COLUMNS)
    for job in jobs:
        writer.writerow(
            [
                *(job.name, repr(job.submit_s), repr(job.duration_s), job.devices, job.group),
                *(job.min_groups, job.max_groups, job.tensor, job.priority, job.user, job.accelerator or ""),
            ]
        )
    return target.getvalue()


class _CsvLine:
    """One line of the file, and what is wrong with it."""

    def __init__(self, file: str, number: int, names: Sequence[str], row: Sequence[str], raw: str) -> None:
        self.file, self.number, self.names, self.row, self.raw = file, number, names, row, raw
        self.mistakes: list[Mistake] = []

    def note(self, name: str, message: str) -> None:
        index = self.names.index(name) if name in self.names else None
        given = self.row[index] if index is not None and index < len(self.row) else None
        column = None
        if index is not None and '"' not in self.raw:
            column = 1 + sum(len(field) + 1 for field in self.row[:index])
        self.mistakes.append(Mistake(self.file, self.number, column, name, given, message))

    def job(self) -> Job | None:
        if len(self.row) != len(self.names):
            message = f"has {len(self.row)} fields, should have {len(self.names)} as the first line"
            self.mistakes.append(Mistake(self.file, self.number, None, "", None, message))
            return None
        values: dict[str, Any] = {}
        for name, field in zip(self.names, self.row, strict=True):
            column, given = COLUMNS[name], field.strip()
            if not given and not column.required:
                continue
            try:
                if not given:
                    raise ValueError(given)
                values[name] = column.read(given)
            except ValueError:
                self.note(name, f"should be {column.allowed}, was {show_value(given)}")
        return None if self.mistakes else self._checked(values)

    def _checked(self, values: Mapping[str, Any]) -> Job | None:
        devices = values["devices"]
        group, tensor = values.get("group", devices), values.get("tensor", 1)
        if devices % group:
            self.note("group", f"should divide devices ({devices}), was {group}")
            return None
        if group % tensor:
            self.note("tensor", f"should divide group ({group}), was {tensor}")
        groups = devices // group
        least, most = values.get("min_groups", groups), values.get("max_groups", groups)
        if not least <= groups:
            self.note("min_groups", f"should be at most devices / group ({groups}), was {least}")
        if not groups <= most:
            self.note("max_groups", f"should be at least devices / group ({groups}), was {most}")
        if self.mistakes:
            return None
        return Job(
            values["job"],
            values["submit_s"],
            values["duration_s"],
            group,
            groups,
            least,
            most,
            tensor,
            values.get("priority", 0),
            values.get("user", ""),
            values.get("accelerator"),
        )


def _wrong_heading(names: Sequence[str], file: str) -> list[Mistake]:
    mistakes = []
    for index, name in enumerate(names):
        column = 1 + sum(len(other) + 1 for other in names[:index])
        if name not in COLUMNS:
            guess = nearest(name, COLUMNS)
            hint = "" if guess is None else f"; did you mean `{guess}`?"
            message = f"unknown column {show_value(name)}{hint} (known: {listed(COLUMNS)})"
            mistakes.append(Mistake(file, 1, column, "", name, message))
        elif name in names[:index]:
            mistakes.append(Mistake(file, 1, column, name, name, "is there twice"))
    for name, known in COLUMNS.items():
        if known.required and name not in names:
            message = f"the column is missing; it holds {known.meaning}: {known.allowed}"
            mistakes.append(Mistake(file, 1, None, name, None, message))
    return mistakes


def _at_most(mistakes: list[Mistake], file: str) -> list[Mistake]:
    if len(mistakes) <= MAX_MISTAKES:
        return mistakes
    more = f"and {len(mistakes) - MAX_MISTAKES} more mistakes, not listed"
    return [*mistakes[:MAX_MISTAKES], Mistake(file, None, None, "", None, more)]
