"""A load on an app: clients that stream answers one after the other, more of them while it is high."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass

import httpx

REQUEST_TIMEOUT_S = 60.0
_AFTER_FAILURE_S = 0.5


@dataclass(frozen=True)
class TimedAnswer:
    """A request that was answered whole. Times are Unix times.

    Attributes:
        first: when its first token was here.
        replica: who answered it, as the answer says; None where it had begun before that was known, with
            comments for who waits.
    """

    sent: float
    first: float
    ended: float
    replica: str | None
    tokens: int


@dataclass(frozen=True)
class FailedRequest:
    """A request that got no whole answer. Times are Unix times.

    Attributes:
        reason: what the client saw.
        told: the service itself said that it refuses, or that the answer breaks off, and why.
        status: of HTTP; None where no answer began.
    """

    sent: float
    ended: float
    reason: str
    told: bool = False
    status: int | None = None


class SteadyLoad:
    """Clients that each keep one request in flight, from the start to the end of a `with`.

    Requests that run at the end are answered first; each is of the same prompt and length.

    Args:
        clients: how many there are at most; nobody asks before `level` says how many do.
        pause_s: between an answer and the client's next request; half a second at least after a failure.
        timeout_s: silence after which a request has failed.

    Attributes:
        answers, failures: in the order of their ends.
        first_tokens: when a token came and by which replica: of each request the first, at once; of those
            whose replica is known.
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
        self._url = f"{base_url}/completions"
        self._body = {
            "model": app,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,  # answers of one length
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self.answers: list[TimedAnswer] = []
        self.failures: list[FailedRequest] = []
        self.first_tokens: list[tuple[float, str]] = []
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
        with httpx.Client(timeout=self._timeout_s) as http:
            seed = index
            while self._may_ask(index):
                seed += self.clients
                sent, pause_s = time.time(), self._pause_s
                try:
                    self.answers.append(self._ask(http, sent, seed))
                except _FailedError as failed:
                    self.failures.append(
                        FailedRequest(sent, time.time(), str(failed), failed.told, failed.status)
                    )
                    pause_s = max(pause_s, _AFTER_FAILURE_S)
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    self.failures.append(FailedRequest(sent, time.time(), f"{type(error).__name__}: {error}"))
                    pause_s = max(pause_s, _AFTER_FAILURE_S)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause_s)

    def _may_ask(self, index: int) -> bool:
        """Wait until this client is one of those that ask; false at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or index < self._level)
            return not self._stopping

    def _ask(self, http: httpx.Client, sent: float, seed: int) -> TimedAnswer:
        first, tokens, whole = 0.0, 0, False
        with http.stream("POST", self._url, json={**self._body, "seed": seed}) as answer:
            if answer.status_code != 200:
                body = answer.read()
                reason = _reason(body)
                shown = body.decode(errors="replace") if reason is None else reason
                raise _FailedError(f"{answer.status_code}: {shown}", answer.status_code, reason is not None)
            replica = answer.headers.get("x-shoal-replica")
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    whole = True
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _FailedError(f"the stream broke off: {event['error']['message']}", 200, told=True)
                if event["choices"] and not first:
                    first = time.time()
                    if replica is not None:
                        self.first_tokens.append((first, replica))
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if not whole or not first:
            raise _FailedError("the stream ended before its last event", 200)
        return TimedAnswer(sent, first, time.time(), replica, tokens)


def _reason(body: bytes) -> str | None:
    """The message of an error in OpenAI's shape."""
    try:
        return str(json.loads(body)["error"]["message"]) or None
    except (ValueError, KeyError, TypeError):
        return None


class _FailedError(Exception):
    """An answer that is none, or not whole; see FailedRequest."""

    def __init__(self, reason: str, status: int, told: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.told = told
