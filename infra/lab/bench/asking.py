"""One request to an app, streamed, and what became of it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import httpx

REQUEST_TIMEOUT_S = 60.0


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


class Asker:
    """Asks an app for answers of one length to one prompt.

    Args:
        timeout_s: silence after which a request has failed.

    Attributes:
        first_tokens: when a token came (Unix time) and by which replica: of each request the first, at once;
            of those whose replica is known.
    """

    def __init__(
        self, base_url: str, app: str, prompt: str, max_tokens: int = 48, timeout_s: float = REQUEST_TIMEOUT_S
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
        self._timeout_s = timeout_s
        self.first_tokens: list[tuple[float, str]] = []

    def client(self) -> httpx.Client:
        """One that `ask` may take, for one request after the other."""
        return httpx.Client(timeout=self._timeout_s)

    def ask(self, http: httpx.Client, sent: float, seed: int) -> TimedAnswer | FailedRequest:
        """Send a request, and read its answer to the end.

        Args:
            sent: since when it counts, in Unix time.
        """
        try:
            return self._ask(http, sent, seed)
        except _FailedError as failed:
            return FailedRequest(sent, time.time(), str(failed), failed.told, failed.status)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            return FailedRequest(sent, time.time(), f"{type(error).__name__}: {error}")

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
