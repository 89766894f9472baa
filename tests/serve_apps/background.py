"""What asks, or looks, in a thread of its own while a test does something to whoever answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run until the end of the context, where the event is set.

    Raises:
        AssertionError: it broke down before; a test would wait in vain for what it does.
    """
    stop = threading.Event()
    broke: list[BaseException] = []

    def run_all() -> None:
        try:
            run(stop)
        except BaseException as error:  # noqa: BLE001  (told below, whatever it is)
            broke.append(error)

    thread = threading.Thread(target=run_all)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if broke:
            raise AssertionError("what ran beside the test broke down") from broke[0]
