"""A load that does not wait for answers: each request is sent when it is due, however many are under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from infra.lab.bench.asking import Asker, FailedRequest, TimedAnswer

MOST_AT_ONCE = 256
"""Requests under way; what is due beyond that is sent late, and counted from when it was due."""


class Arrivals:
    """Sends requests to an app at the times at which they are due.

    Attributes:
        answers, failures: in the order of their ends; `sent` is when a request was due.
    """

    def __init__(self, asker: Asker, due_times: Sequence[float]) -> None:
        self._asker = asker
        self._due_times = due_times
        self._clients = threading.local()
        self.answers: list[TimedAnswer] = []
        self.failures: list[FailedRequest] = []
        self.first_tokens = asker.first_tokens

    def run(self, meanwhile: Callable[[float], None]) -> tuple[float, float]:
        """Send them all, and wait for their answers; from when and until when they were due, in Unix time.

        Args:
            meanwhile: called with the seconds until the next request is due, for which it waits.
        """
        with ThreadPoolExecutor(MOST_AT_ONCE, "asks") as threads:
            began = time.time()
            for number, due in enumerate(self._due_times):
                if (wait_s := began + due - time.time()) > 0:
                    meanwhile(wait_s)
                threads.submit(self._ask, began + due, number)
            ended = time.time()
        return began, ended

    def _ask(self, due: float, seed: int) -> None:
        if not hasattr(self._clients, "http"):  # one a thread, whose connection stays open
            self._clients.http = self._asker.client()
        came = self._asker.ask(self._clients.http, due, seed)
        if isinstance(came, TimedAnswer):
            self.answers.append(came)
        else:
            self.failures.append(came)
