"""The lines from a rank's process to the Ray Train worker that answers for it, and to its node's heart."""

from __future__ import annotations

import os
import pickle
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple, Protocol

from train_jobs.elastic.membership import Beat, Goodbye, Standing, View, Word
from train_jobs.errors import RankError
from train_jobs.rank.script import RankPlace
from train_jobs.spec import GroupSpec
from train_jobs.watch.progress import Activity


class LinkAddress(NamedTuple):
    """Where a link is answered, and the key that opens it."""

    address: str
    authkey: bytes


@dataclass(frozen=True)
class RankOrder:
    """What a rank's process is told at its start.

    Attributes:
        host: address of its node.
        node: name of its node.
        device: index of its GPU among those it can see; None where it has none.
        environment: what it has to have in its environment, besides what torchrun would set.
        heart: where it sends its heartbeats to the other groups, where there are any.
        flights: how the paths begin to which NCCL's flight recorder is to write, in a directory that is the
            rank's alone; None where there is no NCCL.
    """

    spec: GroupSpec
    place: RankPlace
    host: str
    node: str
    device: int | None
    environment: Mapping[str, str]
    heart: LinkAddress | None = None
    flights: str | None = None


class Worker(Protocol):
    """What a rank's process asks of its worker; every call goes there and back."""

    def order(self) -> RankOrder: ...

    def rendezvous(self, address: str | None) -> str:
        """Address of the group's store, as rank 0 names it; waits for that."""

    def metric(self, line: dict[str, Any]) -> bool: ...

    def event(self, kind: str, facts: dict[str, Any]) -> None: ...

    def is_stopping(self) -> bool:
        """Whether the job is to stop."""

    def leave(self) -> None:
        """Let the rank's group leave at its next step boundary."""

    def remind(self, view: View) -> None: ...

    def arrive(self, group: str, standing: Standing, rank_count: int) -> tuple[View, str] | Goodbye: ...

    def watch(self, pid: int, stacks: int) -> None:
        """Watch this process from now on.

        Args:
            stacks: what `write_stacks_when_asked` returned in it.
        """

    def progress(self, activity: Activity) -> None: ...

    def finish(self, status: str) -> None:
        """The rank has come to its end."""

    def fail(self, error: RankError) -> None:
        """An exception ended the rank."""

    def stay(self) -> None:
        """Never returns; the connection breaks when the worker is gone."""


class Heart(Protocol):
    """What takes the heartbeats of a node's ranks; see train_jobs.elastic.heartbeats.Hearts."""

    def heartbeat(self, attempt: int, beat: Beat, at_once: bool) -> Word: ...


class RankLink:
    """The other end: answers ranks' processes until it is closed, or this process ends.

    Each of their threads has a connection of its own, and is answered by a thread of its own.

    Args:
        answers: whose methods are called, by several threads at once.
    """

    def __init__(self, answers: Worker | Heart) -> None:
        self._answers = answers
        # Of Linux's abstract namespace: it leaves no file behind, however this process ends.
        address = f"\0shoal-rank-{os.getpid()}-{secrets.token_hex(8)}"
        self.at = LinkAddress(address, secrets.token_bytes(32))
        self._listener = Listener(address, "AF_UNIX", backlog=64, authkey=self.at.authkey)
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="rank link", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more who calls anew; threads and sockets go with their callers."""
        if not self._closed.is_set():
            self._closed.set()
            with suppress(OSError, EOFError, AuthenticationError):
                Client(*_of(self.at)).close()  # whoever listens sees that it is closed

    def _listen(self) -> None:
        with self._listener as listener:
            while True:
                try:
                    caller = listener.accept()
                except (OSError, EOFError, AuthenticationError):
                    continue  # one that lacks the key, or is gone already
                if self._closed.is_set():
                    caller.close()
                    return
                answer = threading.Thread(
                    target=self._answer, args=(caller,), name="rank link, caller", daemon=True
                )
                answer.start()

    def _answer(self, caller: Connection) -> None:
        with caller, suppress(OSError, EOFError):
            while True:
                method, arguments = caller.recv()
                try:
                    answer = True, getattr(self._answers, method)(*arguments)
                except Exception as error:  # noqa: BLE001  (the caller's to judge)
                    answer = False, error
                try:
                    caller.send(answer)
                except (pickle.PicklingError, TypeError, AttributeError) as error:
                    caller.send((False, RuntimeError(f"{answer[1]!r} cannot travel: {error}")))


class _Calling:
    """The rank's end: its methods are those of whoever answers."""

    def __init__(self, at: LinkAddress) -> None:
        self._at = at
        self._mine = threading.local()
        self._connection()  # that nobody answers is said here

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            connection = self._connection()
            connection.send((method, arguments))
            well, answer = connection.recv()
            if not well:
                raise answer
            return answer

        return call

    def _connection(self) -> Connection:
        if not hasattr(self._mine, "connection"):
            self._mine.connection = Client(*_of(self._at))
        connection: Connection = self._mine.connection
        return connection


def reach_worker(at: LinkAddress) -> Worker:
    """The rank's end; each of its threads has a connection of its own.

    Raises:
        OSError: the worker is gone.
    """
    return _Calling(at)


def reach_heart(at: LinkAddress) -> Heart:
    """The same, for its node's heart."""
    return _Calling(at)


def _of(at: LinkAddress) -> tuple[str, str, bytes]:
    return at.address, "AF_UNIX", at.authkey
