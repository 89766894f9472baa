"""What one request asks for: tokens of a model, and an answer in the words of its API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_apps.openai.chat_format import ChatFormat
from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.format import CompletionFormat, Format, Heading
from serve_apps.openai.parse import parse
from serve_apps.openai.schema import CompletionRequest, Request


@dataclass(frozen=True)
class Asked:
    """A request that was read."""

    request: Request
    format: Callable[[Heading], Format]
    """Makes its answer."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What the client calls the fields that a replica finds wrong, where it is another name."""


Read = Callable[[Any, bool], Asked]
"""From a body (decoded JSON), and whether fields that are not known are passed over, to what it asks.

Raises:
    ApiError: 400, naming the field that is wrong.
"""


def read_completion(document: Any, ignore_unknown: bool) -> Asked:
    """See Read; a body of POST /v1/completions."""
    return Asked(parse(CompletionRequest, document, ignore_unknown=ignore_unknown), CompletionFormat)


def read_chat(document: Any, ignore_unknown: bool) -> Asked:
    """See Read; a body of POST /v1/chat/completions."""
    return Asked(parse(ChatRequest, document, ignore_unknown=ignore_unknown), ChatFormat)
