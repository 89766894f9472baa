"""The heartbeats of a node's ranks, which go to their job's lighthouse together.

A call of Ray's costs whoever answers it about a millisecond of a core: with a call for every rank, several
times a second, a lighthouse could hear a few hundred ranks and no more. No Ray in here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from train_jobs.elastic.membership import Beat, Word


class NodeLighthouse(Protocol):
    """Where the heartbeats go; see train_jobs.elastic.lighthouse."""

    def heartbeats(self, beats: Sequence[Beat]) -> Sequence[Word]:
        """The answers, in the same order; raises whatever it likes where it is away."""

    def say_ended(self, group: str) -> None:
        """Say that a group is over, and do not wait for an answer."""


@dataclass
class _Asked:
    """A heartbeat that waits for its answer."""

    beat: Beat
    at: float
    answer: Word | ConnectionError | None = None


class NodeHeartbeats:
    """Those of one node's ranks, in turns: whoever comes while none is due waits for the next one.

    Args:
        period_s: from one turn to the next.
    """

    def __init__(self, lighthouse: NodeLighthouse, period_s: float) -> None:
        self._lighthouse = lighthouse
        self._period_s = period_s
        self._turn = threading.Condition()
        self._waiting: list[_Asked] = []
        self._due = time.monotonic()
        self._sending = False
        self._groups: set[str] = set()

    def heartbeat(self, beat: Beat, at_once: bool) -> Word:
        """Send a rank's heartbeat, now or with those of the others; returns the answer.

        Raises:
            ConnectionError: the lighthouse is away.
        """
        asked = _Asked(beat, time.monotonic())
        with self._turn:
            self._groups.add(beat.group)
            self._waiting.append(asked)
            if at_once:
                self._due = asked.at
                self._turn.notify_all()
            while asked.answer is None:
                left = self._due - time.monotonic()
                if self._sending or left > 0:
                    self._turn.wait(None if self._sending else left)
                else:
                    self._send()
        if isinstance(asked.answer, ConnectionError):
            raise asked.answer
        return asked.answer

    def ended(self, group: str) -> None:
        """Take in that a process of a group has ended before its time: nobody need wait for its silence."""
        if group in self._groups:
            self._lighthouse.say_ended(group)

    def _send(self) -> None:
        """Send what waits, in the thread of one of those who wait; the turn is held, but not meanwhile."""
        batch, self._waiting = self._waiting, []
        self._sending, self._due = True, time.monotonic() + self._period_s
        self._turn.release()
        answers: Sequence[Word | ConnectionError]
        try:
            now = time.monotonic()
            answers = self._lighthouse.heartbeats([each.beat._replace(age_s=now - each.at) for each in batch])
        except Exception as error:  # noqa: BLE001  (Ray's own would have every rank import Ray)
            answers = [ConnectionError(f"the lighthouse is away: {error}")] * len(batch)
        finally:
            self._turn.acquire()
            self._sending = False
        for each, answer in zip(batch, answers, strict=True):
            each.answer = answer
        self._turn.notify_all()


class Hearts:
    """What a node's ranks call, of whatever attempt of the job they are."""

    def __init__(self) -> None:
        self._of_attempt: dict[int, NodeHeartbeats] = {}

    def open(self, attempt: int, reach: Callable[[], NodeLighthouse], period_s: float) -> None:
        """Ranks of this attempt may call from now on; the ones before are over."""
        if attempt > max(self._of_attempt, default=0):
            self._of_attempt = {attempt: NodeHeartbeats(reach(), period_s)}

    def heartbeat(self, attempt: int, beat: Beat, at_once: bool) -> Word:
        return self._of_attempt[attempt].heartbeat(beat, at_once)

    def ended(self, group: str) -> None:
        for each in self._of_attempt.values():
            each.ended(group)
