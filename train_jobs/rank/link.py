"""The lines from a rank's process to the Ray Train worker that answers for it, and to its node's heart."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
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
    """

    spec: GroupSpec
    place: RankPlace
    host: str
    node: str
    device: int | None
    environment: Mapping[str, str]
    heart: LinkAddress | None = None


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
    """The other end: answers ranks' processes, for as long as this process lives.

    Args:
        answers: whose methods are called, by several threads at once.
    """

    def __init__(self, answers: Worker | Heart) -> None:
        class Answering(BaseManager):
            pass

        Answering.register("answers", callable=lambda: answers)
        # Of Linux's abstract namespace: it leaves no file behind, however this process ends.
        address = f"\0shoal-rank-{os.getpid()}-{secrets.token_hex(8)}"
        self.at = LinkAddress(address, secrets.token_bytes(32))
        server = Answering(*self.at).get_server()
        threading.Thread(target=server.serve_forever, name="rank link", daemon=True).start()


class _Calling(BaseManager):
    pass


_Calling.register("answers")


def reach_worker(at: LinkAddress) -> Worker:
    """The rank's end; each of its threads has a connection of its own.

    Raises:
        OSError: the worker is gone.
    """
    return _reach(at)


def reach_heart(at: LinkAddress) -> Heart:
    """The same, for its node's heart."""
    return _reach(at)


def _reach(at: LinkAddress) -> Any:
    manager = _Calling(*at)
    manager.connect()
    return manager.answers()  # type: ignore[attr-defined]
