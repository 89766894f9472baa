"""A load on an app: clients that stream answers one after the other, more of them while it is high."""

from __future__ import annotations

import threading
import time

from infra.lab.bench.asking import REQUEST_TIMEOUT_S, Asker, FailedRequest, TimedAnswer

_AFTER_FAILURE_S = 0.5


class SteadyLoad:
    """Clients that each keep one request in flight, from the start to the end of a `with`.

    Requests that run at the end are answered first; each is of the same prompt and length.

    Args:
        clients: how many there are at most; nobody asks before `level` says how many do.
        pause_s: between an answer and the client's next request; half a second at least after a failure.
        timeout_s: silence after which a request has failed.

    Attributes:
        answers, failures: in the order of their ends.
        first_tokens: see `Asker`.
    """

    def __init__(
        self,
        base_url: str,
        app: str,
        prompt: str,
        clients: int,
        max_tokens: int = 48,
        pause_s: float = 0.0,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._asker = Asker(base_url, app, prompt, max_tokens, timeout_s)
        self.first_tokens = self._asker.first_tokens
        self._pause_s = pause_s
        self.answers: list[TimedAnswer] = []
        self.failures: list[FailedRequest] = []
        self.clients = clients
        self._level = 0
        self._stopping = False
        self._changed = threading.Condition()
        # A process that is interrupted before the `with` has begun must not wait for them.
        self._threads = [
            threading.Thread(target=self._ask_again_and_again, args=(index,), daemon=True)
            for index in range(clients)
        ]

    def __enter__(self) -> SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def level(self) -> int:
        """How many clients ask."""
        return self._level

    @level.setter
    def level(self, clients: int) -> None:
        with self._changed:
            self._level = clients
            self._changed.notify_all()

    def replicas_since(self, when: float) -> set[str]:
        """Who has answered with a first token since then."""
        return {replica for first, replica in list(self.first_tokens) if first >= when}

    def _ask_again_and_again(self, index: int) -> None:
        with self._asker.client() as http:
            seed = index
            while self._may_ask(index):
                seed += self.clients
                pause_s = self._pause_s
                came = self._asker.ask(http, time.time(), seed)
                if isinstance(came, TimedAnswer):
                    self.answers.append(came)
                else:
                    self.failures.append(came)
                    pause_s = max(pause_s, _AFTER_FAILURE_S)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause_s)

    def _may_ask(self, index: int) -> bool:
        """Wait until this client is one of those that ask; false at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or index < self._level)
            return not self._stopping
