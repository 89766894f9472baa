"""Work that may take long, or never end, in a thread: whoever is asked to stop leaves it behind."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import ray

from train_jobs.driver.data_errors import StoppedError

_LOOK_S = 0.1

Result = TypeVar("Result")


class _Work(threading.Thread):
    def __init__(self, work: Callable[[], object], words: str) -> None:
        super().__init__(name=words, daemon=True)
        self.work = work
        self.result: Any = None
        self.raised: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001  (it is raised where it is waited for)
            self.raised = error


def unless_stopped(work: Callable[[], Result], is_stopping: Callable[[], bool], words: str) -> Result:
    """Do some work on files, which nothing can interrupt; a storage may hang in it.

    What is left behind goes on until the process ends: the work has to leave things so that doing it again is
    enough, and the process has to end by `end_process`.

    Args:
        is_stopping: asked again and again, in the thread that calls.
        words: what is stopped, for a person.

    Raises:
        StoppedError: it is left behind.
        BaseException: what the work raised.
    """
    thread = _Work(work, words)
    thread.start()
    while True:
        thread.join(_LOOK_S)
        if not thread.is_alive():
            break
        if is_stopping():
            raise StoppedError(f"it is stopped while {words}")
    if thread.raised is not None:
        raise thread.raised
    result: Result = thread.result
    return result


def is_left_behind() -> bool:
    """Whether some work of this process goes on that nobody waits for."""
    return any(isinstance(thread, _Work) for thread in threading.enumerate())


def end_process(code: int) -> NoReturn:
    """End it as sys.exit does, but without waiting for work that was left behind.

    When Python ends, pyarrow waits for the requests to an object store that are under way, each with all its
    tries: minutes where the store hangs.
    """
    if is_left_behind():
        ray.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
