"""The audit log of the control API: who has changed what, when, and what came of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.files.line_reader import newest_first
from cluster.files.line_writer import LineWriter
from cluster.files.storage import Storage
from infra.api.roles import ApiCaller

LOG = "audit"
WRITE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class AuditEntry:
    """One line; a change has two, which have its `id`: when it was asked for, and when it was answered."""

    time: str
    id: str
    who: str
    role: str
    address: str
    """Where the request came from, as the server sees it."""
    operation: str
    """What was asked for, by its name in the API's own document."""
    target: str
    """What that was done to: a job, an app, a model, a token, a node."""
    outcome: str
    """asked, done, refused (the request was wrong) or failed."""
    reason: str | None = None
    result: str | None = None
    """What was made by it: a job's id."""


@dataclass
class Change:
    """A change that is being made.

    Attributes:
        result: what was made by it, once that is known.
    """

    result: str | None = None


class AuditLog:
    """Writes it, and reads it from its end on. Not tied to a thread.

    Args:
        storage: the directory of the log.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._writer = LineWriter(storage)

    @contextmanager
    def change(self, caller: ApiCaller, address: str, operation: str, target: str) -> Iterator[Change]:
        """Note that a change was asked for, before it is made; and then what came of it.

        Raises:
            ShoalError: the log cannot be written, and nothing was changed; or what the change raises.
        """
        number, change = uuid.uuid4().hex, Change()

        def entry(outcome: str, reason: str | None = None) -> AuditEntry:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            return AuditEntry(
                *(time, number, caller.name, caller.role, address),
                *(operation, target, outcome, reason, change.result),
            )

        self._writer.add(LOG, [asdict(entry("asked"))], soon=True)
        if not self._writer.written(WRITE_TIMEOUT_S, patient=False):
            why = self._writer.trouble or "its storage does not answer"
            self._writer.add(LOG, [asdict(entry("failed", f"this could not be written: {why}"))])
            raise ShoalError(
                f"nothing was changed: the audit log in {self._storage.location} cannot be written: {why}"
            )
        try:
            yield change
        except RequestError as error:
            self._writer.add(LOG, [asdict(entry("refused", str(error)))], soon=True)
            raise
        except BaseException as error:
            self._writer.add(LOG, [asdict(entry("failed", f"{type(error).__name__}: {error}"))], soon=True)
            raise
        self._writer.add(LOG, [asdict(entry("done"))], soon=True)

    def newest(self, most: int) -> list[dict[str, Any]]:
        """The last lines, the oldest of them first.

        Raises:
            ShoalError: the storage cannot be read.
        """
        self._writer.written(WRITE_TIMEOUT_S, patient=False)
        return list(islice(newest_first(self._storage, LOG), most))[::-1]
