"""The tokens of the control API: made once, shown once, and kept as digests in the cluster's storage."""

from __future__ import annotations

import hmac
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from infra.api.access import digest_of, new_token
from infra.api.roles import ROLES, ApiCaller, Role

FILE = "tokens.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
UP = "up"
"""The name of whoever has brought the cluster up, whose token nobody needs to make."""


@dataclass(frozen=True)
class TokenEntry:
    """What is kept of a token."""

    name: str
    """Whose it is, as the audit log names them."""
    role: Role
    sha256: str
    created_at: str
    created_by: str
    expires_at: str | None = None

    def is_valid(self, now: datetime) -> bool:
        return self.expires_at is None or now < datetime.fromisoformat(self.expires_at)

    def as_json(self) -> dict[str, Any]:
        """The entry without its digest."""
        return {key: value for key, value in asdict(self).items() if key != "sha256"}


class TokenTable:
    """All tokens of one cluster; the control API is the only one that writes them. Not tied to a thread.

    Args:
        storage: the directory of the file.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._entries: tuple[TokenEntry, ...] | None = None
        self._trusted: tuple[str, ...] = ()

    def trust(self, sha256: str) -> None:
        """Take a token of whoever has brought the cluster up, by its digest; it is written nowhere."""
        with self._lock:
            self._trusted = (*self._trusted, sha256)

    def caller_of(self, token: str) -> ApiCaller | None:
        """Whose token this is; None of one that is unknown, or has expired.

        Raises:
            ShoalError: the storage cannot be read.
        """
        given = digest_of(token)
        # First, and without the storage: whoever looks after the cluster comes in when that is away, too.
        if any(hmac.compare_digest(trusted, given) for trusted in self._trusted):
            return ApiCaller(UP, "admin")
        now = datetime.now(UTC)
        for entry in self._all():
            if hmac.compare_digest(entry.sha256, given) and entry.is_valid(now):
                return ApiCaller(entry.name, entry.role)
        return None

    def entries(self) -> list[TokenEntry]:
        """All of them, the oldest first."""
        return list(self._all())

    def make(self, name: str, role: Role, created_by: str, expires_at: datetime | None = None) -> str:
        """Make a token for somebody; it is returned this once.

        Raises:
            RequestError: the name cannot be one, or is taken; or the time is over already.
            ShoalError: the storage does not take it.
        """
        if not NAME.fullmatch(name) or name == UP:
            raise RequestError(
                f"{name!r} cannot be the name of a token: letters, digits and . _ @ - make one, 63 at most;"
                f" {UP!r} is taken"
            )
        now = datetime.now(UTC)
        if expires_at is not None and expires_at <= now:
            raise RequestError(f"the token would have expired at {expires_at.isoformat()}")
        token = new_token()
        entry = TokenEntry(
            name=name,
            role=role,
            sha256=digest_of(token),
            created_at=now.isoformat(timespec="seconds"),
            created_by=created_by,
            expires_at=None if expires_at is None else expires_at.isoformat(timespec="seconds"),
        )
        with self._lock:
            entries = self._read()
            if any(each.name == name for each in entries):
                raise RequestError(f"there is a token {name!r} already; revoke it, or choose another name")
            self._write((*entries, entry))
        return token

    def revoke(self, name: str) -> None:
        """Take a token back; what it has begun goes on.

        Raises:
            RequestError: there is none of this name.
            ShoalError: the storage does not take it.
        """
        with self._lock:
            entries = self._read()
            left = tuple(entry for entry in entries if entry.name != name)
            if len(left) == len(entries):
                known = ", ".join(entry.name for entry in entries) or "none"
                raise RequestError(f"there is no token {name!r}; there are: {known}")
            self._write(left)

    def _all(self) -> tuple[TokenEntry, ...]:
        with self._lock:
            return self._read()

    def _read(self) -> tuple[TokenEntry, ...]:
        if self._entries is None:
            self._entries = self._load()
        return self._entries

    def _load(self) -> tuple[TokenEntry, ...]:
        if not self._storage.exists(FILE):
            return ()
        where = f"{self._storage.location}/{FILE}"
        try:
            rows = json.loads(self._storage.read_bytes(FILE))
            entries = tuple(TokenEntry(**row) for row in rows)
        except (ValueError, TypeError) as error:
            raise ShoalError(
                f"{where} is damaged ({error}): no token of it counts until that is mended"
            ) from error
        return tuple(_sound(entry, where) for entry in entries)

    def _write(self, entries: Sequence[TokenEntry]) -> None:
        self._storage.write_bytes(FILE, json.dumps([asdict(entry) for entry in entries], indent=2).encode())
        self._entries = tuple(entries)


def _sound(entry: TokenEntry, where: str) -> TokenEntry:
    if entry.role not in ROLES:
        raise ShoalError(f"{where} is damaged: {entry.name} has the role {entry.role!r}")
    return entry
