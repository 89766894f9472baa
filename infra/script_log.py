"""The log of a script's job: what its driver says, and between that what its rank 0 prints."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator

from cluster.files.storage import Storage
from infra.rank_output import RankLine, RankOutput
from train_jobs.records.job_status import RAY_RUNS
from train_jobs.records.run_log import RunSummary, read_events

_ENDS = re.compile(r"(?:failed attempt=(\d+)|trained|finished)\b")
"""What the driver says when an attempt has ended, or the last one has."""


class ScriptLog:
    """The lines of both that are new since they were last asked for.

    Neither carries times: a rank's lines stand before the line that says that their attempt has ended.

    Args:
        run: the job's directory.
        said: all that the driver has printed so far.
        status: Ray's status of its submission.

    Attributes:
        runs: whether the driver was there at the last look.
    """

    def __init__(self, run: Storage, said: Callable[[], str], status: Callable[[], str | None]) -> None:
        self.runs = True
        self._output = RankOutput(run)
        self._said, self._status = said, status
        self._seen = 0
        self._past = _attempts_of_others(run)

    def new(self, *, last: bool = False) -> Iterator[str | RankLine]:
        """A text is a line of the driver, without its end.

        Args:
            last: nobody asks again: a line without its end is one too.
        """
        self.runs = self._status() in RAY_RUNS  # before the look at what it wrote
        last = last or not self.runs
        said = self._new_of_driver(last)  # before what it tells of
        printed = deque(self._output.new(last=last))

        def until(attempt: float) -> Iterator[RankLine]:
            while printed and printed[0].attempt <= attempt:
                yield printed.popleft()

        yield from until(self._past)
        for line in said:
            if ends := _ENDS.match(line):
                yield from until(math.inf if ends[1] is None else int(ends[1]))
            yield line
        yield from printed

    def _new_of_driver(self, last: bool) -> list[str]:
        text = self._said()[self._seen :]
        whole = text if last else text[: text.rfind("\n") + 1]
        self._seen += len(whole)
        return whole.splitlines()


def _attempts_of_others(run: Storage) -> int:
    """The last attempt that was made before the job was last submitted, by a driver before this one."""
    summary, before = RunSummary(""), 0
    for event in read_events(run):
        if event["kind"] == "submitted":
            before = summary.attempts
        summary.apply(event)
    return before
