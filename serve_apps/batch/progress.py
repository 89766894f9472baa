"""How far a run is, and plain lines that say so."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType

from serve_apps.batch.manifest import Totals

_LINE_EVERY_S = 5.0


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    rows: int
    """Of the whole input."""
    done: Totals
    """Of all runs, this one's unfinished shards included."""
    new: Totals
    """Of this run."""
    seconds: float
    """Since the first engine of this run was ready; 0 before."""

    def figures(self) -> str:
        """Speed and failures, for people."""
        if not self.new.rows:
            return "starting"
        rows, tokens = self.new.rows / self.seconds, self.new.completion_tokens / self.seconds
        failed = f", {self.done.failed:,} failed" if self.done.failed else ""
        return f"{rows:,.1f} rows/s, {tokens:,.0f} tokens/s{failed}"


class View:
    """Shows a run as lines on standard error."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, progress: Progress) -> None:
        """What is known now; called about once a second."""
        if progress.new.rows and time.monotonic() - self._shown >= _LINE_EVERY_S:
            self._shown = time.monotonic()
            self.say(f"{progress.done.rows:,}/{progress.rows:,} rows  {progress.figures()}")

    def say(self, text: str) -> None:
        """One sentence."""
        print(text, file=sys.stderr, flush=True)
