"""The request of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from serve_apps.openai.fields import MAX_LOGPROBS, Content, StrictModel, ToolCalls
from serve_apps.openai.schema import Request
from serve_apps.openai.tools import Choice, ToolChoice, Tools, schema_of_calls

OWN_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_dict",
        "tokenize",
        "tools",
    }
)
"""Arguments of a template's rendering that other fields give, or none may."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Message(StrictModel):
    """One turn of a conversation. What is not known of it is for the model's chat template."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "anyOf": [
                {"required": ["content"]},
                {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array"}}},
            ]
        },
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    refusal: str | None = None
    tool_calls: ToolCalls = None
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates take it: what is null or empty was not said, but for the text."""
        said = {name: value for name, value in self if not _is_empty(value)}
        if "reasoning" in said:  # as newer servers name what templates call reasoning_content
            said.setdefault("reasoning_content", said["reasoning"])
        return {**said, "content": self.content}


def _is_empty(value: Any) -> bool:
    """Whether a field says nothing; an object of nothing but nulls is how some clients dump one that is not
    there."""
    if isinstance(value, dict):
        return all(one is None for one in value.values())
    return value is None or value in ([], "")


def template_of(
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any] | None,
    *,
    continue_final_message: bool | None,
    add_generation_prompt: bool | None,
) -> dict[str, Any]:
    """What a chat template is given beside the messages, as far as it is not the default."""
    asked = {
        "tools": tools,
        "arguments": arguments,
        "continue_final_message": continue_final_message,
        "no_generation_prompt": add_generation_prompt is False,
    }
    return {name: value for name, value in asked.items() if value}


class Conversation(Request):
    """What a request says of the answer to a conversation."""

    tools: Tools = None
    """Functions that the model may call."""
    tool_choice: Choice = None
    """Whether it calls them: none, auto (the default), required, or one by its name."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; the default is yes."""
    reasoning_effort: Effort | None = None
    """Handed to the chat template, with `enable_thinking`: whether it is not `none`."""
    include_reasoning: bool | None = None
    """Extension: false leaves the reasoning out of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: further arguments of the model's chat template, like `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Extension: whether the prompt ends where an answer begins; the default is yes."""
    continue_final_message: bool | None = None
    """Extension: the answer goes on with the last message, which stays open."""

    def turns(self) -> list[dict[str, Any]]:
        """The conversation, as chat templates take it."""
        raise NotImplementedError

    def prompts(self) -> list[dict[str, Any]]:
        return [{"messages": self.turns(), "template": self.template(), "reading": self.reading()}]

    @property
    def choice(self) -> ToolChoice:
        """What it says of calls."""
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown, and may call."""
        if self.choice.mode == "none" or not self.tools:
            return []
        allowed = None if self.choice.allowed is None else frozenset(self.choice.allowed)
        return [tool for tool in self.tools if allowed is None or tool["function"]["name"] in allowed]

    def template(self) -> dict[str, Any]:
        """What the chat template is given beside the messages, as far as it is not the default."""
        return template_of(
            self.callable_tools,
            self._template_arguments(),
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )

    def _template_arguments(self) -> dict[str, Any]:
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
            arguments.setdefault("enable_thinking", self.reasoning_effort != "none")
        return arguments

    def reading(self) -> dict[str, Any]:
        """How the answer's text is read: which calls it may hold, and whether its reasoning is told."""
        asked: dict[str, Any] = {}
        if tools := self.callable_tools:
            functions = [tool["function"] for tool in tools]
            asked["functions"] = [{key: one.get(key) for key in ("name", "parameters")} for one in functions]
            asked["mode"], asked["name"] = self.choice.mode, self.choice.name
            asked["parallel"] = self.parallel_tool_calls is not False
        if arguments := self._template_arguments():
            asked["arguments"] = arguments
        if self.include_reasoning is False:
            asked["hide_reasoning"] = True
        return asked

    def sampling(self) -> dict[str, Any]:
        said = super().sampling()
        if self.choice.forced:
            parallel = self.parallel_tool_calls is not False
            said["json_schema"] = json.dumps(
                schema_of_calls(self.callable_tools, self.choice, parallel=parallel)
            )
        return said


class ChatRequest(Conversation):
    """The body of POST /v1/chat/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Request.NEUTRAL,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "echo": (False,),
        "add_special_tokens": (False,),
    }

    messages: tuple[Message, ...] = Field(min_length=1, strict=False, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def turns(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]


class Translation(Conversation):
    """A request of another API in the words of this one; made of what was checked there."""

    spoken: list[dict[str, Any]]
    """The turns, as chat templates take them."""
    reported: int | None = None
    """See `alternatives`."""
    length_field: str = "max_tokens"
    """What the other API calls `max_tokens`."""

    @property
    def most_tokens_field(self) -> str:
        return self.length_field

    @property
    def alternatives(self) -> int | None:
        return self.reported

    def turns(self) -> list[dict[str, Any]]:
        return self.spoken
