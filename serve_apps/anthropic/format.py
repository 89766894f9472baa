"""From what an answer gains to what clients of /v1/messages read: blocks, and events about them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from serve_apps.anthropic.answers import MessagesAnswer, MessagesErrorAnswer, MessagesUsage, StopReason
from serve_apps.anthropic.errors import error_body
from serve_apps.anthropic.schema import MessagesRequest, parse_messages
from serve_apps.openai.answers import Usage
from serve_apps.openai.asked import Asked, Read
from serve_apps.openai.errors import ApiError
from serve_apps.openai.format import ChoiceEvent, Gathered, Heading, cached_tokens
from serve_apps.openai.turns import arguments_of

Event = dict[str, Any]
_STOP_REASONS: Mapping[str | None, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Answers of /v1/messages: thinking, words, calls, and words that came after a call, in this order.

    The input of a call is told once it is whole, since clients read every piece of it as JSON. Of arguments
    that are cut off or no JSON it is what can be read of them.
    """

    NAMED_EVENTS: ClassVar[bool] = True

    def __init__(self, request_id: str | None, heading: Heading) -> None:
        self._heading = heading
        self._request_id = request_id
        self._blocks: list[Event] = []
        """As they stand in the answer; the last one grows while `_pieces` is not None."""
        self._pieces: list[str] | None = None
        self._late: list[str] = []
        """Words after the first call: they wait for the end, as calls may follow."""
        self._finish_reason: str | None = None
        self._stop_string: str | None = None

    def answer(self, gathered: Gathered, used: Usage) -> MessagesAnswer:
        """See Format."""
        self.chunks(gathered.event(0))
        self.ending(used)
        return {
            **self._message(used),
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
        }

    def opening(self, used: Usage) -> list[Event]:
        """See Format."""
        return [{"type": "message_start", "message": self._message(used)}]

    def chunks(self, event: ChoiceEvent) -> list[Event]:
        """See Format."""
        item = event.item
        events: list[Event] = []
        if item.get("reasoning"):
            events += self._grow("thinking", item["reasoning"])
        early = len(item["text"]) - item.get("text_after_calls", 0)
        if early:
            events += self._grow("text", item["text"][:early])
        for _, call_id, name, arguments in item.get("calls", ()):
            if call_id is not None and name is not None:
                events += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            if self._pieces is not None:
                self._pieces.append(arguments)
        if early < len(item["text"]):
            self._late.append(item["text"][early:])
        self._finish_reason = item.get("finish_reason") or self._finish_reason
        self._stop_string = item.get("stop_string") or self._stop_string
        return events

    def ending(self, used: Usage) -> list[Event]:
        """See Format."""
        events: list[Event] = []
        if self._late or not self._blocks:
            # An answer without anything has an empty text: clients look for one.
            events += self._grow("text", "".join(self._late))
        events += self._close()
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": _usage(used)},
            {"type": "message_stop"},
        ]

    def failure(self, error: ApiError) -> MessagesErrorAnswer:
        """See Format."""
        return error_body(error, self._request_id)

    @property
    def _stop_sequence(self) -> str | None:
        """The one that ended the answer; not where it ended with a call."""
        return self._stop_string if self._finish_reason == "stop" else None

    @property
    def _stop_reason(self) -> StopReason:
        if self._stop_sequence is not None:
            return "stop_sequence"
        return _STOP_REASONS.get(self._finish_reason, "end_turn")

    def _message(self, used: Usage) -> MessagesAnswer:
        """The message before anything of its content is known."""
        return {
            "id": f"msg_{self._heading.id}",
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(used),
        }

    def _grow(self, kind: str, text: str) -> list[Event]:
        """Add a piece to the last block, or to a new one where that is of another kind."""
        events: list[Event] = []
        if self._pieces is None or self._blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            events = self._begin({"type": kind, kind: "", **more})
        assert self._pieces is not None
        self._pieces.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})] if text else events

    def _begin(self, block: Event) -> list[Event]:
        events = self._close()
        self._blocks.append(block)
        self._pieces = []
        index = len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": {**block}}]

    def _close(self) -> list[Event]:
        """End the last block, if it is not ended."""
        if self._pieces is None:
            return []
        text, self._pieces = "".join(self._pieces), None
        block, events = self._blocks[-1], []
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
            told = json.dumps(block["input"], ensure_ascii=False)
            events.append(self._delta({"type": "input_json_delta", "partial_json": told}))
        else:
            block[block["type"]] = text
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _usage(used: Usage) -> MessagesUsage:
    cached = cached_tokens(used)
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "output_tokens": used["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def read_messages(request_id: str | None) -> Read:
    """Reads a body of POST /v1/messages, see Read.

    Args:
        request_id: is told with errors.
    """

    def read(document: Any, ignore_unknown: bool) -> Asked:
        _, translation = parse_messages(MessagesRequest, document, ignore_unknown=ignore_unknown)
        return Asked(translation, lambda heading: MessagesFormat(request_id, heading), {"prompt": "messages"})

    return read
