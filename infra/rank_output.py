"""What the ranks of a script print, as it comes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.files.backend import MissingError
from cluster.files.storage import Storage
from train_jobs.spec import LOGS

_ATTEMPT = re.compile(r"attempt-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True)
class RankLine:
    """One line of a rank's output; its last one may lack its end."""

    attempt: int
    rank: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """The line as `shoal logs --json` prints it."""
        return {"source": "rank", "attempt": self.attempt, "rank": self.rank, "line": self.text}


class RankOutput:
    """The lines that ranks have printed since they were last asked for.

    Args:
        run: the job's directory, on storage that is mounted.
        rank: of this one; None for all of them.
    """

    def __init__(self, run: Storage, rank: int | None = 0) -> None:
        self._logs = run.child(LOGS)
        self._rank = rank
        self._read: dict[str, int] = {}

    def new(self, *, last: bool = False) -> Iterator[RankLine]:
        """In the order of attempts and ranks.

        Args:
            last: nothing more is coming: a line without its end is one too.
        """
        for attempt, directory in self._numbered("", _ATTEMPT):
            for rank, name in self._numbered(directory, _RANK):
                if self._rank in (None, rank):
                    for text in self._lines(f"{directory}/{name}", last):
                        yield RankLine(attempt, rank, text)

    def _numbered(self, path: str, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
        found = ((pattern.fullmatch(name), name) for name in self._logs.list(path))
        return sorted((int(match[1]), name) for match, name in found if match)

    def _lines(self, path: str, last: bool) -> list[str]:
        start = self._read.get(path, 0)
        try:
            data = self._logs.read_bytes(path, start)
        except MissingError:
            return []
        whole = data if last else data[: data.rfind(b"\n") + 1]
        self._read[path] = start + len(whole)
        return whole.decode(errors="replace").splitlines()
