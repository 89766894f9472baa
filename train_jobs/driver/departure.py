"""Whether a group that was asked to leave has had its time. Pure."""

from __future__ import annotations

from collections.abc import Callable

WORD_S = 2.0
"""So long a rank's word that it saves may be on its way to whoever asks: ranks give it once a second."""


class Departure:
    """The time that a group has which was asked to leave.

    Who saves is about to leave: how long that may take, whoever watches its ranks knows. A save may have
    begun just before the time was over: a group is late only when no word of one has come for as long as
    that may be on its way.

    Args:
        leave_by: when the time is over, of a clock that only goes forward.
        is_saving: whether ranks of the group have said a moment ago that they write to the storage.
    """

    def __init__(self, leave_by: float, is_saving: Callable[[], bool]) -> None:
        self._leave_by = leave_by
        self._is_saving = is_saving
        self._silent_since: float | None = None

    def is_late(self, now: float) -> bool:
        """Whether the group is to be taken down; asked again and again."""
        if now < self._leave_by:
            return False
        if self._is_saving():
            self._silent_since = None
            return False
        if self._silent_since is None:
            self._silent_since = now
        return now - self._silent_since >= WORD_S
