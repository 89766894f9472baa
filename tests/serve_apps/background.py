"""Clients that ask in a thread of their own while a test does something to whoever answers them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def in_background(run: Callable[[threading.Event], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run until the end of the context, where the event is set.

    Raises:
        AssertionError: it broke down before; a test would wait in vain for what it does.
    """
    stop = threading.Event()
    broke: list[BaseException] = []

    def run_all() -> None:
        try:
            asyncio.run(run(stop))
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
            raise AssertionError("the clients broke down") from broke[0]
