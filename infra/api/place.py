"""How far somebody has come in a stream that is read from several logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster.errors import RequestError

if TYPE_CHECKING:
    from cluster.files.storage import Storage

NOW = "now"
"""Instead of a place: what is there already is passed over."""
MOST_CHARACTERS = 12_000
_COUNT = re.compile(r"([A-Za-z0-9_-]{1,80}):(\d{1,12})", re.ASCII)


class Place:
    """How many lines of each log somebody has seen, as the `id` of a stream's events says it.

    Args:
        seen: by the log's key.
    """

    def __init__(self, seen: Mapping[str, int] | None = None) -> None:
        self._seen: Counter[str] = Counter(seen or {})

    @classmethod
    def read(cls, text: str) -> Place:
        """A place that was written before.

        Raises:
            RequestError: it is none.
        """
        found = [_COUNT.fullmatch(part) for part in text[:MOST_CHARACTERS].split(",")]
        if not all(found) or len(text) > MOST_CHARACTERS:
            raise RequestError(f"{text[:40]!r} is no place in a stream: the `id` of one of its events is")
        return cls({match[1]: int(match[2]) for match in found if match})

    def __str__(self) -> str:
        return ",".join(f"{key}:{count}" for key, count in sorted(self._seen.items()))

    @property
    def seen(self) -> Mapping[str, int]:
        """How many lines of each log."""
        return self._seen

    def reach(self, key: str, number: int) -> None:
        """Have seen so many lines of a log."""
        self._seen[key] = number

    def passes(self, key: str, past: Place) -> bool:
        """Count a line of a log; whether it lies beyond another place."""
        self._seen[key] += 1
        return self._seen[key] > past._seen[key]


def place_now(run: Storage, job: str) -> Place:
    """The place of whoever has seen all that a job's stream has told.

    Args:
        run: the job's directory.
    """
    from infra.job_logs import JobLogs

    return Place(Counter(kind for kind, _ in JobLogs(run, job).new()))
