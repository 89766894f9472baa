"""How far a script is, from what it prints and what it writes: pure logic, and one look at a directory."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"[\r\n]+")
_MOST_UNFINISHED = 65_536
_MOST_FILES = 10_000


@dataclass(frozen=True)
class ScriptStep:
    """What a script says of a step.

    Attributes:
        steps: all there are, where it says so.
        loss: None where it says none.
    """

    step: int
    steps: int | None = None
    loss: float | None = None


class ScriptProgress:
    """Reads steps out of what a script prints.

    Lines end as on a terminal: a progress bar that draws itself again begins another one. Of several bars the
    first that says how many steps there are counts (an evaluation has one of its own), and steps only go up.

    Args:
        pattern: a regular expression with the group `step`, and perhaps `steps` and `loss`. A line may have
            the loss alone: it goes with the next step.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._unfinished = ""
        self._last: int | None = None
        self._steps: int | None = None
        self._loss: float | None = None

    def read(self, text: str) -> ScriptStep | None:
        """Take in what was printed since the last call; the last step in it, if there was one."""
        *lines, self._unfinished = _LINE.split(self._unfinished + text)
        self._unfinished = self._unfinished[-_MOST_UNFINISHED:]
        found = [step for line in lines if (step := self._step_of(line)) is not None]
        return found[-1] if found else None

    def _step_of(self, line: str) -> ScriptStep | None:
        match = self._pattern.search(line)
        if match is None:
            return None
        said = match.groupdict()
        if said.get("loss") is not None:
            self._loss = _number(said["loss"])
        number, steps = _number(said["step"]), _number(said.get("steps"))
        step = None if number is None else int(number)
        if step is None or (self._last is not None and step <= self._last):
            return None
        if steps is not None:
            self._steps = self._steps or int(steps)
            if self._steps != int(steps):
                return None
        self._last, loss, self._loss = step, self._loss, None
        return ScriptStep(step, self._steps, loss)


def _number(text: str | None) -> float | None:
    """What a group holds as a number: `1,234`, `0.5`; None where it is none, or is not finite."""
    with suppress(ValueError):
        number = math.nan if text is None else float(text.strip().replace(",", ""))
        return number if math.isfinite(number) else None
    return None


class Stillness:
    """Tells when a script hangs: nothing new of it is seen for too long.

    Args:
        start_s: longest until its first step.
        step_s: longest from then on.
        now: in seconds of a clock that only goes forward.
    """

    def __init__(self, start_s: float, step_s: float, now: float) -> None:
        self._start_s = start_s
        self._step_s = step_s
        self._steps = False
        self._last = now

    def moved(self, now: float, *, step: bool = False) -> None:
        """Something new was seen; `step` says that it was a step."""
        self._last = now
        self._steps = self._steps or step

    def hang(self, now: float) -> str | None:
        """What is wrong, without the subject; None while nothing is."""
        limit_s = self._step_s if self._steps else self._start_s
        if now - self._last <= limit_s:
            return None
        until = "" if self._steps else ", and has named no step yet"
        return f"has printed and saved nothing for {limit_s:g} s{until}"


def fingerprint(directory: Path) -> tuple[int, int, int]:
    """Of what lies in a directory: how many files, their bytes, and when the newest was written (ns)."""
    files = size = newest = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it may go at this moment
                status = os.stat(os.path.join(path, name))
                files, size, newest = files + 1, size + status.st_size, max(newest, status.st_mtime_ns)
        if files > _MOST_FILES:
            break
    return files, size, newest
