"""From what an answer gains to what clients of /v1/responses read: output items, and events about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from serve_apps.openai.answers import ChatLogprob, Usage
from serve_apps.openai.asked import Asked
from serve_apps.openai.chat_format import token_logprobs
from serve_apps.openai.errors import ApiError
from serve_apps.openai.format import ChoiceEvent, Gathered, Heading, cached_tokens, reasoning_tokens
from serve_apps.openai.responses_schema import ResponsesRequest, parse_response
from serve_apps.openai.tools import ToolChoice

Event = dict[str, Any]


@dataclass
class _OutputItem:
    """One item of the output while it grows."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    index: int
    call: Mapping[str, str] = field(default_factory=dict)
    """`call_id` and `name`, and maybe `namespace`."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str, logprobs: Sequence[ChatLogprob] = ()) -> Event:
        """Its only part of content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def shown(self, status: str) -> Event:
        """As it stands in an answer."""
        begun = status == "in_progress"
        item: Event = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**item, **self.call, "arguments": self.text}
        content = [] if begun else [self.part(self.text, self.logprobs)]
        if self.kind == "message":
            return {**item, "role": "assistant", "content": content}
        return {**item, "summary": [], "content": content, "encrypted_content": None}


class ResponsesFormat:
    """Answers of /v1/responses: reasoning, words, calls, and words that came after a call, in this order."""

    NAMED_EVENTS: ClassVar[bool] = True

    def __init__(self, request: ResponsesRequest, heading: Heading) -> None:
        self._heading = heading
        self._homes = request.offered.homes
        self._heads = _heads(request, heading)
        self._done: list[Event] = []
        """Items that are complete."""
        self._open: _OutputItem | None = None
        self._late: list[str] = []
        """Words after the first call: they wait for the end, as calls may follow."""
        self._early_logprobs: list[ChatLogprob] = []
        """Of tokens without text before the first words."""
        self._finish_reason: str | None = None
        self._number = 0
        """Of the next event."""

    def answer(self, gathered: Gathered, used: Usage) -> dict[str, Any]:
        """See Format."""
        self.chunks(gathered.event(0))
        response: dict[str, Any] = self.ending(used)[-1]["response"]
        return response

    def opening(self, used: Usage) -> list[Event]:
        """See Format."""
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def chunks(self, event: ChoiceEvent) -> list[Event]:
        """See Format."""
        item = event.item
        events: list[Event] = []
        if item.get("reasoning"):
            events += self._grow("reasoning", item["reasoning"])
        early = len(item["text"]) - item.get("text_after_calls", 0)
        events += self._say(item["text"][:early], self._logprobs(item))
        for _, call_id, name, arguments in item.get("calls", ()):
            if call_id is not None and name is not None:
                events += self._begin("function_call", self._call(call_id, name))
            if arguments:
                events += self._grow("function_call", arguments)
        if early < len(item["text"]):
            self._late.append(item["text"][early:])
        self._finish_reason = item.get("finish_reason") or self._finish_reason
        return events

    def ending(self, used: Usage) -> list[Event]:
        """See Format."""
        events: list[Event] = []
        if self._late:
            events += self._begin("message")
            events += self._grow("message", "".join(self._late))
        elif self._open is None:
            # Who reads an answer looks for its text.
            events += self._begin("message")
        whole = self._finish_reason != "length"
        status = "completed" if whole else "incomplete"
        events += self._close(status)
        response = self._response(status, used)
        return [*events, self._event(f"response.{status}", response=response)]

    def failure(self, error: ApiError) -> Event:
        """See Format."""
        codes = {429: "rate_limit_exceeded"}
        code = codes.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        told = {"code": code, "message": error.message, "type": error.code, "param": error.param}
        begun = [] if self._open is None else [self._open.shown("incomplete")]
        response = self._response("failed")
        response["output"] += begun
        return self._event("response.failed", response={**response, "error": told})

    def _say(self, text: str, logprobs: list[ChatLogprob]) -> list[Event]:
        speaking = self._open is not None and self._open.kind == "message"
        if text or speaking:
            logprobs, self._early_logprobs = self._early_logprobs + logprobs, []
            return self._grow("message", text, logprobs) if text or logprobs else []
        self._early_logprobs += logprobs
        return []

    def _grow(
        self, kind: Literal["reasoning", "message", "function_call"], text: str, logprobs: Any = ()
    ) -> list[Event]:
        """Add a piece to the open item of this kind, which begins here if there is none."""
        events = self._begin(kind) if self._open is None or self._open.kind != kind else []
        item = self._open
        assert item is not None
        item.texts.append(text)
        item.logprobs += logprobs
        where = {"item_id": item.id, "output_index": item.index}
        if kind == "function_call":
            return [*events, self._event("response.function_call_arguments.delta", **where, delta=text)]
        if kind == "reasoning":
            name, more = "response.reasoning_text.delta", {}
        else:
            name, more = "response.output_text.delta", {"logprobs": list(logprobs)}
        return [*events, self._event(name, **where, content_index=0, delta=text, **more)]

    def _begin(
        self,
        kind: Literal["reasoning", "message", "function_call"],
        call: Mapping[str, str] | None = None,
    ) -> list[Event]:
        events = self._close("completed")
        index = len(self._done)
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self._open = item = _OutputItem(kind, f"{prefix}_{self._heading.id}_{index}", index, call or {})
        shown = item.shown("in_progress")
        events.append(self._event("response.output_item.added", output_index=index, item=shown))
        if kind != "function_call":
            where = {"item_id": item.id, "output_index": index, "content_index": 0}
            events.append(self._event("response.content_part.added", **where, part=item.part("")))
        return events

    def _close(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        shown = item.shown(status)
        self._done.append(shown)
        where: Event = {"item_id": item.id, "output_index": item.index}
        if item.kind == "function_call":
            events = [
                self._event(
                    "response.function_call_arguments.done",
                    **where,
                    name=item.call["name"],
                    arguments=item.text,
                )
            ]
        else:
            where["content_index"] = 0
            if item.kind == "reasoning":
                name, more = "response.reasoning_text.done", {}
            else:
                name, more = "response.output_text.done", {"logprobs": item.logprobs}
            (part,) = shown["content"]
            events = [
                self._event(name, **where, text=item.text, **more),
                self._event("response.content_part.done", **where, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=item.index, item=shown)]

    def _call(self, call_id: str, name: str) -> Mapping[str, str]:
        if name not in self._homes:
            return {"call_id": call_id, "name": name}
        namespace, inside = self._homes[name]
        return {"call_id": call_id, "name": inside, "namespace": namespace}

    def _logprobs(self, item: Mapping[str, Any]) -> list[ChatLogprob]:
        """Those of the words: tokens of the reasoning stand before them, those of calls behind."""
        if not self._heading.with_logprobs:
            return []
        logprobs = item.get("logprobs") or ()
        words = logprobs[item.get("lead_tokens", 0) : len(logprobs) - item.get("call_tokens", 0)]
        return token_logprobs(words)

    def _response(self, status: str, used: Usage | None = None) -> Event:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._heads,
            "status": status,
            "incomplete_details": incomplete,
            "output": list(self._done),
            "usage": None if used is None else _usage(used),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def read_response(document: Any, ignore_unknown: bool) -> Asked:
    """See Read; a body of POST /v1/responses."""
    request, translation = parse_response(document, ignore_unknown=ignore_unknown)
    return Asked(
        translation,
        partial(ResponsesFormat, request),
        {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"},
    )


def _heads(request: ResponsesRequest, heading: Heading) -> Event:
    """What is the same in all states of a response."""
    text, reasoning = request.text, request.reasoning
    form: Event = {"type": "text"}
    if text is not None and text.format is not None:
        form = {"type": text.format.type}
        if text.format.json_schema is not None:
            form |= {"name": text.format.name or "answer", "schema": text.format.json_schema}
    return {
        "id": f"resp_{heading.id}",
        "object": "response",
        "created_at": heading.created,
        "model": heading.model,
        "background": False,
        "error": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": form},
        "tool_choice": _shown_choice(request.tool_choice or ToolChoice("auto")),
        "tools": request.offered.shown(),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }


def _shown_choice(choice: ToolChoice) -> str | Event:
    if choice.mode == "named":
        return {"type": "function", "name": choice.name}
    if choice.allowed is not None:
        return {"type": "allowed_tools", "mode": choice.mode, "tools": _named(choice.allowed)}
    return choice.mode


def _named(names: Iterable[str]) -> list[Event]:
    return [{"type": "function", "name": name} for name in names]


def _usage(used: Usage) -> Event:
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens(used), "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(used)},
        "total_tokens": used["total_tokens"],
    }
