"""The autoscaling policy of every deployment: it has as many replicas as the controller of the apps says.

Serve pickles this module by value into its controller: it stands alone, and imports lazily.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("ray.serve")

ASK_EVERY_S = 0.5
SILENCE_S = 2.0
"""Seconds after the policy's last call for which its deployment counts as being there."""
ANSWER_TIMEOUT_S = 10.0


class SizeKeeper:
    """Asks how many replicas there are to be, from a thread of its own, and keeps the last answer.

    The thread lives while `keep` is called: a deployment that Serve has forgotten stops asking.

    Args:
        ask: how many there are to be (None: not known), of how many so far; it may take its time and fail.
    """

    def __init__(self, application: str, ask: Callable[[int], int | None]) -> None:
        self._application = application
        self._ask = ask
        self._has = 0
        self._told_at = 0.0
        self._thread: threading.Thread | None = None
        self._pause = threading.Event()
        self.size: int | None = None
        """The last answer; a controller that is gone changes nothing. None before the first."""

    def keep(self, has: int) -> None:
        """Go on asking; returns at once.

        Args:
            has: how many there are to be so far.
        """
        self._has = has
        self._told_at = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"size-{self._application}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while time.monotonic() - self._told_at < SILENCE_S:
            try:
                size = self._ask(self._has)
                if size is not None:
                    self.size = size
            except Exception as error:  # noqa: BLE001 - whatever it is, the replicas that run must go on
                logger.warning("%s: no controller, the replicas stay: %r", self._application, error)
            self._pause.wait(ASK_EVERY_S)


class ControlledSize:
    """Serve makes one in its controller for each deployment and calls it several times a second."""

    def __init__(self, application: str) -> None:
        self._keeper = SizeKeeper(application, self._ask)
        self._application = application
        self._controller: Any = None

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        self._keeper.keep(ctx.target_num_replicas)
        size = self._keeper.size
        return (ctx.target_num_replicas if size is None else size), {}

    def _ask(self, has: int) -> int | None:
        from cluster.actors import NAMESPACE
        from cluster.actors.named_actor import NamedActor
        from serve_apps.spec import CONTROLLER

        if self._controller is None:
            self._controller = NamedActor(CONTROLLER, NAMESPACE)
        answer: int | None = self._controller.call("size", self._application, has, timeout_s=ANSWER_TIMEOUT_S)
        return answer
