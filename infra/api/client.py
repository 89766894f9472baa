"""The client of the control API: what the command line asks, without Ray and without much to import."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from cluster.errors import ConfigError, Mistake, RequestError, ShoalError
from infra.api import PREFIX
from infra.api.unix_socket import UnixSocketHandler

TIMEOUT_S = 60.0
APPLY_TIMEOUT_S = 180.0
"""Of a request that may have to wait until Ray Serve has started."""
DOWNLOAD_S = 1800.0
"""Longest that nothing may come of what is downloaded: a large model is made first."""
SILENT_S = 45.0
"""A stream says something at least every 15 s."""
PATIENCE_S = 20.0
"""So long a service that does not answer is asked again: one whose process has ended is back well before."""
STREAM_PATIENCE_S = 180.0
"""The same of a stream that has begun: a laptop may lose its network for a while."""
NOTED_AFTER_S = 3.0
AGAIN_S = 0.3


class NoAnswerError(ShoalError):
    """Nothing answers at the address."""


class UntrustedError(NoAnswerError):
    """What answers cannot prove what it is, or does not try."""


class UnavailableError(ShoalError):
    """It cannot be done now."""


class BadPackageError(ShoalError):
    """The package that a request names has to be sent (again)."""


@dataclass(frozen=True)
class Endpoint:
    """Where a control API is, and what opens it.

    Attributes:
        url: of the service, without a path.
        token: a token.
        authority: a file with certificates to trust beside those of the system.
        own: the cluster was brought up from here: no proxy is asked for the way, and `authority` is the
            service's own certificate, whatever name it is for.
        socket: a unix socket of this machine that comes out there.
        renamed: how URLs in its documents begin, and how they do from here.
    """

    url: str
    token: str
    authority: str | None = None
    own: bool = False
    socket: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamEvent:
    """One event of a stream."""

    kind: str
    data: Any
    id: str | None


class ApiClient:
    """Asks a control API. Not tied to a thread.

    Every method raises NoAnswerError where nothing answers, RequestError or ConfigError where the request was
    wrong, and ShoalError where it cannot be done.

    Args:
        patience_s: how long a service that does not answer is asked again.
        stream_patience_s: the same for a stream that has begun.
        hopeless: says why that would be in vain; None where it may come back.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        patience_s: float = PATIENCE_S,
        stream_patience_s: float = STREAM_PATIENCE_S,
        hopeless: Callable[[], str | None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._hopeless = hopeless or (lambda: None)
        self._patience_s, self._stream_patience_s = patience_s, stream_patience_s
        self._opener = urllib.request.build_opener(*_handlers(endpoint))

    def get(self, path: str, **query: Any) -> Any:
        """Ask for a document."""
        return self._ask("GET", path, query=query)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Have something done."""
        return self._ask("POST", path, body)

    def put(self, path: str, body: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> Any:
        """Have something be as it says."""
        return self._ask("PUT", path, body, timeout_s=timeout_s)

    def delete(self, path: str) -> Any:
        """Have something taken away."""
        return self._ask("DELETE", path)

    def send(self, path: str, file: BinaryIO, size_bytes: int) -> Any:
        """Send a file, from where it stands."""
        request = self._request("PUT", path, {})
        request.data = file
        request.add_header("Content-Type", "application/octet-stream")
        request.add_header("Content-Length", str(size_bytes))
        with self._open(request, SILENT_S * 10) as answer:
            return _document(answer.read())

    def download(self, path: str, body: Mapping[str, Any], file: BinaryIO) -> Mapping[str, str]:
        """Have something made, and write it into a file; the headers of the answer.

        Raises:
            ShoalError: it broke off on the way, too.
        """
        request = self._request("POST", path, {})
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
        with self._open(request, DOWNLOAD_S) as answer:
            try:
                shutil.copyfileobj(answer, file)
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswerError(
                    f"{self.endpoint.url} broke off: {error or type(error).__name__}"
                ) from error
            return {key.lower(): value for key, value in answer.headers.items()}

    def stream(
        self,
        path: str,
        *,
        timeout_s: float | None = None,
        body: Mapping[str, Any] | None = None,
        **query: Any,
    ) -> Iterator[StreamEvent]:
        """The events of a stream, each once; where the connection is lost it goes on from the last one.

        It ends with the event `end` or `failed`, which is among them. A `note` says that the service does not
        answer, and is asked again.

        Args:
            timeout_s: for all of it.
            body: of a request that has something done, and can be made again where it was cut off.

        Raises:
            ShoalError: nothing has answered for long, or the time is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        last: str | None = None
        begun = noted = False
        heard = time.monotonic()
        pause = threading.Event()

        def check_time() -> None:
            if deadline is not None and time.monotonic() > deadline:
                raise ShoalError(f"{path} has not ended within {timeout_s:.0f} s")

        while True:
            request = self._request("GET" if body is None else "POST", path, query)
            request.add_header("Accept", "text/event-stream")
            if body is not None:
                request.data = json.dumps(body).encode()
                request.add_header("Content-Type", "application/json")
            if last is not None:
                request.add_header("Last-Event-ID", last)
            try:
                with self._open(request, SILENT_S) as answer:
                    begun = True
                    for event in _events(answer):
                        heard, noted = time.monotonic(), False
                        check_time()
                        if event is None:  # a sign of life
                            continue
                        last = event.id or last
                        yield event
                        if event.kind in ("end", "failed"):
                            return
                why: Exception = ShoalError("it broke off")
            except UntrustedError:
                raise
            except (NoAnswerError, UnavailableError, OSError, http.client.HTTPException, ValueError) as error:
                if not begun or (isinstance(error, NoAnswerError) and self._hopeless() is not None):
                    raise
                why = error
            away_s = time.monotonic() - heard
            if away_s > max(self._patience_s, self._stream_patience_s):
                raise NoAnswerError(f"{self.endpoint.url} does not answer any more: {why}")
            if away_s > NOTED_AFTER_S and not noted:
                noted = True
                yield StreamEvent(
                    "note", {"text": f"{self.endpoint.url} does not answer; asking again"}, None
                )
            check_time()
            pause.wait(AGAIN_S)

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        request = self._request(method, path, query or {})
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        with self._open(request, timeout_s) as answer:
            return renamed(_document(answer.read()), self.endpoint.renamed)

    def _request(self, method: str, path: str, query: Mapping[str, Any]) -> urllib.request.Request:
        known = {key: value for key, value in query.items() if value is not None}
        text = f"?{urllib.parse.urlencode(known, doseq=True)}" if known else ""
        request = urllib.request.Request(f"{self.endpoint.url}{PREFIX}{path}{text}", method=method)
        request.add_header("Authorization", f"Bearer {self.endpoint.token}")
        return request

    def _open(self, request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
        """The answer to a request; one that found nobody is made again for a while."""
        deadline, pause = time.monotonic() + self._patience_s, threading.Event()
        url = self.endpoint.url
        while True:
            try:
                answer: http.client.HTTPResponse = self._opener.open(request, timeout=timeout_s)
                return answer
            except urllib.error.HTTPError as error:
                raise _error_of(error, url) from None
            except (OSError, http.client.HTTPException) as error:  # URLError too, which wraps others
                reason = getattr(error, "reason", error)
                why = str(reason) or type(reason).__name__
                if isinstance(reason, ssl.SSLError):
                    raise UntrustedError(f"{url} cannot be trusted: {why}") from error
                # What changes something is said again only where nobody has heard it.
                refused = isinstance(reason, ConnectionRefusedError)
                if request.get_method() != "GET" and not refused:
                    raise NoAnswerError(
                        f"{url} broke off: {why}; whether it was carried out, `shoal status` says"
                    ) from error
                if isinstance(reason, TimeoutError) or time.monotonic() > deadline:
                    raise NoAnswerError(f"{url} does not answer: {why}") from error
                if (hopeless := self._hopeless()) is not None:
                    raise NoAnswerError(hopeless) from error
            pause.wait(AGAIN_S)


def _handlers(endpoint: Endpoint) -> list[urllib.request.BaseHandler]:
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if endpoint.own:
        handlers.append(urllib.request.ProxyHandler({}))
    if endpoint.socket is not None:
        handlers.append(UnixSocketHandler(endpoint.socket))
    elif endpoint.url.startswith("https:"):
        try:
            if endpoint.own and endpoint.authority is not None:
                context = ssl.create_default_context(cafile=endpoint.authority)
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
                context.check_hostname = False
            else:
                context = ssl.create_default_context()
                if endpoint.authority is not None:
                    context.load_verify_locations(cafile=endpoint.authority)
        except OSError as error:
            raise ShoalError(f"the certificates in {endpoint.authority} cannot be read: {error}") from error
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return handlers


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token goes to nobody else."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ShoalError(f"what answers is no control API of Shoal's: {data[:80]!r}") from error


def renamed(document: Any, names: Mapping[str, str]) -> Any:
    """A document with its URLs as they are reached from here; see Endpoint."""
    if not names:
        return document
    if isinstance(document, dict):
        return {key: renamed(value, names) for key, value in document.items()}
    if isinstance(document, list):
        return [renamed(value, names) for value in document]
    for there, here in names.items():
        if isinstance(document, str) and (document == there or document.startswith(f"{there}/")):
            return here + document.removeprefix(there)
    return document


def _error_of(error: urllib.error.HTTPError, url: str) -> ShoalError:
    """What an answer of a status from 400 on says."""
    try:
        found = json.loads(error.read())["error"]
        kind, message, mistakes = found["kind"], str(found["message"]), found["mistakes"]
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        kind_of_error = UnavailableError if error.code >= 500 else ShoalError  # of a proxy between
        return kind_of_error(f"{url} answered {error.code}, and not as a control API of Shoal's does")
    if kind == "config":
        return ConfigError([Mistake(**mistake) for mistake in mistakes])
    if kind == "package":
        return BadPackageError(message)
    if kind in ("request", "token", "role", "missing"):
        return RequestError(message)
    return UnavailableError(message) if kind == "cluster" else ShoalError(message)


def _events(answer: http.client.HTTPResponse) -> Iterator[StreamEvent | None]:
    """Server-sent events, as the HTML standard has them; None for each comment.

    Raises:
        OSError, http.client.HTTPException: the connection is lost.
    """
    kind, identity, data = "message", None, list[str]()
    for raw in answer:
        line = raw.decode("utf-8").rstrip("\r\n")
        if not line:
            if data:
                yield StreamEvent(kind, json.loads("\n".join(data)), identity)
            kind, identity, data = "message", None, []
        elif line.startswith(":"):
            yield None
        else:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                kind = value
            elif name == "id":
                identity = value
            elif name == "data":
                data.append(value)
