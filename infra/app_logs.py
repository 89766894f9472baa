"""What an app's gateway, its replicas and their ranks have written, wherever it lies; of dead ones too.

Ray keeps the output of each process in files of its node, and hands them out by its state API for as long as
the node is there, however the process ended. How Ray names its processes, and their files, is private to it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.hosts.embedded.session_directory import session_directory
from cluster.state.connection import ClusterRecord, point_at
from infra.log_lines import LogLine, Origin
from serve_apps.controller.ray_private import replica_named
from serve_apps.spec import GATEWAY, SERVE_NAMESPACE, is_gateway

OUTPUTS = ("out", "err")
LOOK_EVERY_S = 2.0
"""How often a follower looks whether there are new processes."""
_MOST_ACTORS = 10_000
_ALL = -1

Say = Callable[[str], None]


@dataclass(frozen=True)
class AppProcess:
    """One process whose output there may be."""

    origin: Origin
    application: str
    """APP:REVISION; of a gateway its own."""
    actor_id: str
    node_id: str | None
    pid: int | None
    alive: bool


@dataclass(frozen=True)
class Written:
    """One line that a process wrote."""

    origin: Origin
    line: LogLine
    log: str
    """The key of the output that it is in."""
    number: int
    """Its place there, from 1."""


Emit = Callable[[Written], None]


@dataclass(frozen=True)
class Wanted:
    """Which lines."""

    app: str
    replica: str | None = None
    request: str | None = None
    tail: int | None = None
    """So many of each process, the last ones."""

    def has(self, line: LogLine) -> bool:
        return (self.app == GATEWAY or line.is_of(self.app)) and (
            self.request is None or line.is_about(self.request)
        )


def sources_of(rows: Iterable[Any], app: str, replica: str | None = None) -> list[AppProcess]:
    """The processes of an app among Ray's actors: the dead ones first, and the gateways last.

    Args:
        rows: of `ray.util.state.list_actors`.
        replica: of this one only; gateways are none then.
    """
    found = [source for row in rows if (source := _source(row)) is not None]
    wanted = [
        s
        for s in found
        if s.application.rpartition(":")[:2] == (app, ":")
        and not is_gateway(s.application)
        and replica in (None, s.origin.replica)
    ]
    if replica is None and (wanted or app == GATEWAY):
        wanted += [s for s in found if is_gateway(s.application)]
    return sorted(
        wanted,
        key=lambda s: (
            s.origin.kind == "gateway",
            s.alive,
            s.application,
            s.origin.replica,
        ),
    )


def _source(row: Any) -> AppProcess | None:
    name = row.name or ""
    named = replica_named(name)
    if named is None:
        return None
    application, replica = named
    origin = Origin("gateway" if is_gateway(application) else "replica", replica)
    return AppProcess(origin, application, row.actor_id, row.node_id, row.pid, row.state != "DEAD")


class AppLogs:
    """The logs of a cluster's apps.

    Args:
        joined: this process is one of the cluster's, and so has its address and token.

    Raises:
        ShoalError: from every method, when Ray's state API does not answer.
    """

    def __init__(self, record: ClusterRecord, *, joined: bool = False) -> None:
        if not joined:
            point_at(record)
        self._url, self._address = record.dashboard_url, record.gcs_address
        self._directory = session_directory(record.name)

    def apps(self) -> list[str]:
        """The apps of which there is anything; `gateway` stands for all that the gateways have logged."""
        applications = {source.application for row in self._actors() if (source := _source(row))}
        return sorted({application.partition(":")[0] for application in applications})

    def sources(self, wanted: Wanted) -> list[AppProcess]:
        """The processes whose lines are wanted.

        Raises:
            RequestError: the app has no replica of that id.
        """
        rows = self._actors()
        # One that has no process yet, or never got one, has written nothing.
        found = [source for source in sources_of(rows, wanted.app, wanted.replica) if source.pid]
        if not found and wanted.replica is not None:
            known = [s.origin.replica for s in sources_of(rows, wanted.app) if s.origin.kind == "replica"]
            there = f"; there are {', '.join(known)}" if known else ""
            raise RequestError(f"{wanted.app} has no replica {wanted.replica!r}{there}")
        return found

    def read(self, wanted: Wanted, emit: Emit, say: Say) -> None:
        """Emit what there is now, process by process."""
        for source in self.sources(wanted):
            for suffix in OUTPUTS:
                try:
                    lines = _numbered(self._raw(source, suffix), wanted)
                    for number, line in lines if wanted.tail is None else deque(lines, maxlen=wanted.tail):
                        emit(Written(source.origin.of(line), line, _key(source, suffix), number))
                except ShoalError as error:
                    say(str(error))

    def follow(
        self, wanted: Wanted, emit: Emit, say: Say, past: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Emit what there is, and then what comes, of processes that start meanwhile too; until interrupted.

        Each output has a thread that waits for Ray's answer; that of a process that has ended waits on.

        Args:
            past: how many lines of each output are known.
        """
        lines: queue.SimpleQueue[Written] = queue.SimpleQueue()
        known: set[str] = set()
        dead: set[str] = set()
        tail = wanted.tail
        away = False
        sources = self.sources(wanted)
        while True:
            dead.update(source.actor_id for source in sources if not source.alive)
            for source in sources:
                if source.actor_id not in known:
                    known.add(source.actor_id)
                    for suffix in OUTPUTS:
                        known_lines = past.get(_key(source, suffix), 0)
                        feed = (source, suffix, replace(wanted, tail=tail), known_lines, dead, lines.put, say)
                        threading.Thread(target=self._feed, args=feed, daemon=True).start()
            tail = None  # what starts from here on is new from its first line
            look_at = time.monotonic() + LOOK_EVERY_S
            with suppress(queue.Empty):
                while (left := look_at - time.monotonic()) > 0:
                    emit(lines.get(timeout=left))
            try:
                sources, away = self.sources(wanted), False
            except ShoalError as error:
                if not away:
                    say(f"{error}; looking again")
                away = True

    def _feed(
        self,
        source: AppProcess,
        suffix: str,
        wanted: Wanted,
        past: int,
        dead: Set[str],
        put: Emit,
        say: Say,
    ) -> None:
        """Put the lines of one output, all or the last ones, and what comes while its process lives.

        Args:
            past: how many of its lines are known.
        """
        broken, log = False, _key(source, suffix)
        while True:
            ends = source.actor_id in dead
            try:
                if wanted.tail is not None and not past:
                    chosen, past = _last(self._raw(source, suffix), wanted)
                    for number, line in chosen:
                        put(Written(source.origin.of(line), line, log, number))
                for text in islice(self._raw(source, suffix, follow=not ends), past, None):
                    past, broken = past + 1, False
                    for _, line in _numbered((text,), wanted):
                        put(Written(source.origin.of(line), line, log, past))
            except ShoalError as error:
                if not broken:
                    say(str(error))
                broken = True
            if ends:
                return
            time.sleep(LOOK_EVERY_S)  # Ray's answer broke off

    def _raw(self, source: AppProcess, suffix: str, *, follow: bool = False) -> Iterator[str]:
        """The lines of one output of a process, from its start.

        Raises:
            ShoalError: there are none, or no more, that can be read.
        """
        from ray.util.state import get_log
        from ray.util.state.exception import RayStateApiException

        output: dict[str, Any] = {"actor_id": source.actor_id, "suffix": suffix}
        read = False
        try:
            parts = get_log(address=self._address, follow=follow, tail=_ALL, encoding=None, **output)
            # A line that is being written when an answer breaks off is read again.
            for line in _lines(parts, unended=not follow):
                read = True
                yield line
        except (RayStateApiException, OSError, RuntimeError, ValueError) as error:
            file = None if read else self._local_file(source, suffix)
            if file is None:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ShoalError(
                    f"{source.origin.prefix} its {suffix} file cannot be read from its node: {reason}"
                ) from error
            with file.open("rb") as opened:
                yield from _lines(iter(lambda: opened.read(65536), b""))

    def _local_file(self, source: AppProcess, suffix: str) -> Path | None:
        """The file on this machine, for a process of a node of this machine that is gone."""
        pattern = f"**/logs/worker-*-*-{source.pid}.{suffix}"
        files = [file for file in self._directory.glob(pattern) if _is_of(file, source)]
        return max(files, key=lambda file: file.stat().st_mtime, default=None)

    def _actors(self) -> Sequence[Any]:
        from ray.util.state import list_actors
        from ray.util.state.exception import RayStateApiException

        try:
            return list_actors(
                address=self._url,
                filters=[("ray_namespace", "=", SERVE_NAMESPACE)],
                limit=_MOST_ACTORS,
                detail=True,
                raise_on_missing_output=False,
            )
        except (RayStateApiException, OSError, RuntimeError) as error:
            raise ShoalError(f"Ray does not say which processes there are or were: {error}") from error


def _key(source: AppProcess, suffix: str) -> str:
    return f"{source.actor_id}-{suffix}"


def _numbered(raw: Iterable[str], wanted: Wanted) -> Iterator[tuple[int, LogLine]]:
    """The lines that are wanted, with their numbers among all, from 1."""
    for number, text in enumerate(raw, start=1):
        line = LogLine.read(text)
        if line is not None and wanted.has(line):
            yield number, line


def _last(raw: Iterable[str], wanted: Wanted) -> tuple[deque[tuple[int, LogLine]], int]:
    """The last of the lines that are wanted, and how many lines there are at all."""
    number = 0

    def counted() -> Iterator[str]:
        nonlocal number
        for text in raw:
            number += 1
            yield text

    return deque(_numbered(counted(), wanted), maxlen=wanted.tail), number


def _lines(parts: Iterator[Any], *, unended: bool = True) -> Iterator[str]:
    """Whole lines of bytes that come in any pieces; at the end also one that has no end yet (`unended`)."""
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
    if rest and unended:
        yield rest.decode(errors="replace")


def _is_of(file: Path, source: AppProcess) -> bool:
    """Whether a process of this kind wrote a file: process ids come again."""
    with file.open(errors="replace") as lines:
        head = "".join(islice(lines, 5))
    return f":actor_name:ServeReplica:{source.application}:" in head
