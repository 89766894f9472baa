"""Following a rollout from the outside, until it has ended, and saying how it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import ShoalError
from serve_apps.controller.client import ControllerClient

LOOK_EVERY_S = 0.2

Say = Callable[[str], None]


def say_nothing(text: str) -> None:
    """A `Say` for who wants to hear nothing."""


class RolloutFollower:
    """How a rollout of an app goes, look by look.

    Args:
        number: the revision that is to have all requests, or (`back`) none any more.
    """

    def __init__(self, controller: ControllerClient, name: str, number: int, *, back: bool = False) -> None:
        self._controller = controller
        self._name, self._number, self._back = name, number, back
        self._last = ""

    @property
    def line(self) -> str:
        """What was said last."""
        return self._last

    def look(self) -> tuple[list[str], bool]:
        """What there is to say that was not said before, and whether it has ended.

        Raises:
            ShoalError: it failed.
        """
        name, number = self._name, self._number
        row = self._controller.describe().get(name)
        outcome = row["rollout"] if row is not None else self._controller.outcome(name)
        if outcome is None:
            raise ShoalError(f"{name} was taken down")
        status = outcome["status"]
        waits = outcome["number"] < number
        if outcome["number"] > number:
            raise ShoalError(f"{name} was changed again, to {outcome['to_version']}, before this had ended")
        failed = not waits and (status == "failed" or (status == "rolled_back" and not self._back))
        # A first version that failed takes the app with it.
        if failed and (outcome["strategy"] != "start" or row is None):
            raise ShoalError(_failed(name, outcome, still_there=row is not None))
        switched = outcome.get("switched", False) and not self._back
        ended = not (failed or waits) and (status != "running" or switched)
        if ended and row is not None and row["settled"]:
            kept = f"{name}: {outcome['to_version']} has all requests; what was before is kept for a while"
            return [kept] if switched and status == "running" else [], True
        line = f"waits until {outcome['to_version']} is gone" if waits else _progress(row, outcome)
        if row is not None and row["note"]:
            line = row["note"]
        before, self._last = self._last, line
        return [] if line == before else [f"{name}: {line}"], False


def follow(
    controller: ControllerClient,
    name: str,
    number: int,
    *,
    deadline: float,
    say: Say = say_nothing,
    back: bool = False,
) -> None:
    """Wait until a revision of an app has all requests, or (`back`) has none any more.

    Raises:
        ShoalError: it failed, or took longer than until the deadline.
    """
    follower, pause = RolloutFollower(controller, name, number, back=back), threading.Event()
    while True:
        said, ended = follower.look()
        for sentence in said:
            say(sentence)
        if ended:
            return
        if time.monotonic() >= deadline:
            raise ShoalError(
                f"{name} was not ready in time ({follower.line}); `shoal status` shows how it goes on"
            )
        pause.wait(LOOK_EVERY_S)


def _progress(row: Mapping[str, Any] | None, outcome: Mapping[str, Any]) -> str:
    if row is None:
        return "is being taken down"
    if row["status"] == "going_back":
        return f"goes back, {outcome['reason']}"
    change = f"{outcome['strategy']} {outcome['from_version']} → {outcome['to_version']}: "
    ready = outcome.get("ready", row["replicas"])
    if outcome["strategy"] == "start":
        return f"starting {outcome['to_version']}, {ready} of {max(1, row['wanted'])} replicas run"
    if outcome.get("stage") is not None:
        return change + outcome["stage"]
    return change + f"{ready} new replicas run, {row['replicas']} in all"


def _failed(name: str, outcome: Mapping[str, Any], *, still_there: bool) -> str:
    reason = outcome["reason"]
    if outcome["status"] == "rolled_back":
        return f"{name}: the change to {outcome['to_version']} was taken back: {reason}"
    if outcome["strategy"] == "start":
        return f"{name} could not be started: {reason}"
    kept = f"; it still serves {outcome['from_version']}" if still_there else ""
    return f"{name} could not be changed to {outcome['to_version']}{kept}: {reason}"
