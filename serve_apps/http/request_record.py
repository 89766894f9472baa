"""What is known of one request: filled in on its way, found by whoever answers it."""

from __future__ import annotations

import json
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime

CLIENT_CLOSED = 499
"""The status under which a request counts whose client went away; nobody receives it."""

_ENGINE_ID = re.compile(r"(.+)-[0-9a-f]{8}-\d+(?:-tokens)?(?:-[0-9a-f]{32})?")
"""See `RequestRecord.engine_id`, `replica_requests`, and `ReplicaBackend.generate`."""
_GIVEN_ID = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")


@dataclass
class RequestRecord:
    """One request, filled in on its way through the gateway; None and "" where something does not apply."""

    request_id: str
    method: str = ""
    endpoint: str = ""
    """The route's path, with the names of its parameters; empty where there is no such route."""
    app: str = ""
    """Empty where the request named no app that there is."""
    tenant: str | None = None
    """Whose caller was let in; None before that, and where nobody has to be."""
    status: int | None = None
    answered: bool = False
    """Whether the whole answer was handed to the server."""
    stream: bool | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokenized: int = 0
    """Tokens that a text was taken apart into, or that were put together, without the model."""
    replicas: list[str] = field(default_factory=list)
    model_version: str | None = None
    first_token_s: float | None = None
    output_token_s: float | None = None
    """Time for each token of a stream after its first, on average; of several choices, of the longest."""
    error: str | None = None
    """The code of the error with which it ended."""
    arrived: datetime = field(default_factory=lambda: datetime.now(UTC))
    began: float = field(default_factory=time.monotonic)

    def ran_on(self, replicas: list[str], model_version: str | None) -> None:
        """Note which replicas took the request."""
        self.replicas, self.model_version = replicas, model_version

    def seconds(self) -> float:
        """Time since it arrived."""
        return time.monotonic() - self.began

    def engine_id(self) -> str:
        """An id for the replicas' logs: the request's own, made unique, since clients may send one twice."""
        return f"{self.request_id}-{uuid.uuid4().hex[:8]}"

    def line(self, seconds: float) -> str:
        """The request as one line of JSON."""
        document = {
            "time": shown(self.arrived),
            "request_id": self.request_id,
            "endpoint": self.endpoint or None,
            "method": self.method or None,
            "status": self.status,
            "app": self.app or None,
            "tenant": self.tenant,
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "replicas": self.replicas or None,
            "model_version": self.model_version,
            "seconds": _rounded(seconds),
            "first_token_s": _rounded(self.first_token_s),
            "output_token_s": _rounded(self.output_token_s),
            "error": self.error,
        }
        return json.dumps(document)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def shown(moment: datetime) -> str:
    """A time (UTC) as the log's lines have it: ISO 8601, milliseconds."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


RECORD = "shoal.record"
"""In a scope: the record of its request."""


_current: ContextVar[RequestRecord | None] = ContextVar("shoal_request", default=None)


def client_id(engine_id: str) -> str:
    """The id by which a client knows a request, from an engine's, the rest of which is the answer's key."""
    found = _ENGINE_ID.fullmatch(engine_id)
    return engine_id if found is None else found[1]


def request_id(given: str) -> str:
    """The id of a request whose header `x-request-id` is `given`: that, where it can be one, else new."""
    return given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex


def current_id() -> str | None:
    """The id of the request that is answered here; None outside of all requests."""
    record = _current.get()
    return None if record is None else record.request_id


def current_record() -> RequestRecord:
    """The request that this task, or the task that started it, answers."""
    record = _current.get()
    assert record is not None, "only code that answers a request asks for it"
    return record


class Answering:
    """While in this context, what is logged belongs to a request."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    def __enter__(self) -> RequestRecord:
        self._token = _current.set(self._record)
        return self._record

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
