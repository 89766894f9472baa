"""Watches the process of one rank, and ends it where it hangs: not before it is known where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.node.sessions import DEATH_S
from train_jobs.errors import RankError
from train_jobs.watch.flight_recorder import FlightRecorder
from train_jobs.watch.progress import Activity, HangWatch
from train_jobs.watch.rank_stacks import RankStacks, waits_for_others

OF_HANG_TIMEOUT = 0.85
_FIRST_WORD_S = 300.0
"""What a rank imports may lie on a disk that many read from."""
_AFTER_THE_CAUSE_S = 0.5
_ITS_END_S = 10.0
"""Whoever started a process hears of its end at once, and tells when what that had started has ended too; it
may be gone itself."""
_LOOK_S = 0.05
_NO_STACK = "no stack could be had: the process does not even answer a signal"


class RankWatch:
    """Watches a rank's process for the worker that answers for it.

    Args:
        rank: global rank.
        hang_timeout_s: as the job's `recovery` says.
        keep: takes the stacks of a rank that hangs.
        began: when the rank was started; `now` of the other methods is of the same clock.
        pause: waits for so many seconds.
        recorder: that of the rank's collectives, where it has one.
    """

    def __init__(
        self,
        rank: int,
        hang_timeout_s: float,
        keep: Callable[[str], None],
        began: float,
        pause: Callable[[float], None] = time.sleep,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.rank = rank
        self._keep = keep
        self._pause = pause
        self._recorder = recorder
        # Earlier than asked for: keeping the stacks and ending the group takes time too.
        self._hangs = HangWatch(OF_HANG_TIMEOUT * hang_timeout_s, began, _FIRST_WORD_S)
        self._process: RankStacks | None = None
        self._dead_since: float | None = None

    def watch(self, process: RankStacks) -> None:
        """Watch this process from now on."""
        self._process = process

    @property
    def has_process(self) -> bool:
        """Whether the rank has said which process it is."""
        return self._process is not None

    @property
    def saves(self) -> bool:
        """Whether the rank writes to the storage, as it has said last."""
        return self._hangs.saves

    def heard(self, activity: Activity, now: float) -> None:
        self._hangs.heard(activity, now)

    def end_if_it_hangs(self, now: float) -> None:
        """Kill a rank that does not get on, once it is known where it stands.

        It is said when it and all that it had started have ended: until then its devices are its own.

        Raises:
            RankError: it did not; or it is dead, and nobody says how it ended.
        """
        wrong = self._hangs.hang(now)
        if wrong is None:
            return
        if self._process is None:
            raise RankError(self.rank, None, "Hang", wrong, "", hung=True)
        if self._process.is_dead():
            self._await_its_end(self._process, now)
            return
        state, stopped = self._process.state(), self._process.is_stopped()
        asked = self._recorder is not None and self._recorder.ask()  # it writes while the stacks are had
        trace = self._process.dump()
        if trace is None and self._process.is_dead():
            return
        trace = trace or _NO_STACK
        waits = not stopped and waits_for_others(trace)
        if waits:
            # The one that it waits for is heard first. One that waits for this rank would end with it, and
            # take with it where it stands: killed only when others have had the time to look at that.
            self._pause(_AFTER_THE_CAUSE_S)
        if self._recorder is not None and asked:
            self._recorder.wait(self._pause)
        self._process.kill()
        self._keep(trace)  # only now: a storage that does not answer must not keep the process alive
        if not self._await_death(self._process):
            who = "what it had started" if self._process.is_dead() else "it"
            state += f"; {DEATH_S:.0f} s after it was killed {who} had not ended"
        message, begun = f"{wrong} ({state})", self._hangs.collectives
        raise RankError(
            self.rank, None, "Hang", message, trace, hung=True, collective=waits, collectives=begun
        )

    def _await_death(self, process: RankStacks) -> bool:
        for _ in range(round(DEATH_S / _LOOK_S)):
            if process.has_ended():
                return True
            self._pause(_LOOK_S)
        return process.has_ended()

    def _await_its_end(self, process: RankStacks, now: float) -> None:
        # It does not hang: its peers were killed because they do, or whatever else ended it. How, its worker
        # is about to hear.
        if self._dead_since is None:
            self._dead_since = now
        if now - self._dead_since > _ITS_END_S + (0.0 if process.has_ended() else DEATH_S):
            raise RankError(self.rank, None, "RankDied", "nobody says how it ended", "", died=True)
