"""The requests of /v1/messages and its count_tokens, and what they ask in the words of the chat API.

By hand, as those of OpenAI's API: the types of Anthropic's package are for who sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from serve_apps.anthropic.content import Messages, System
from serve_apps.anthropic.tools import MessagesChoice, MessagesTools, MessagesToolSet
from serve_apps.openai.chat_schema import Translation
from serve_apps.openai.fields import Stop, StrictModel
from serve_apps.openai.parse import check_template, check_tools, parse_fields
from serve_apps.openai.responses_tools import check_others
from serve_apps.openai.schema import JsonSchema, ResponseFormat
from serve_apps.openai.turns import opened


class _Loose(BaseModel):
    """A part of a request of which some changes nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ThinkingSettings(_Loose):
    """Whether the model thinks before it answers; `budget_tokens` changes nothing."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the thinking out of the answer."""


class OutputForm(_Loose):
    """What form the answer's text must have."""

    type: Literal["json_schema"]
    # `schema` is a method of pydantic's.
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputSettings(_Loose):
    """Of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Handed to the chat template as `reasoning_effort`."""
    format: OutputForm | None = None


def _context(value: Any) -> None:
    """Edits that take thinking out of what came before: templates see to that. Others are not carried out."""
    if not isinstance(value, dict | None):
        raise ValueError("must be an object")
    edits = (value or {}).get("edits")
    if not isinstance(edits, list | None):
        raise ValueError("must have a list as its 'edits'")
    for edit in edits or ():
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith(_CLEARS_THINKING):
            raise ValueError(f"must have no 'edits' but such as '{_CLEARS_THINKING}20251015'")


_CLEARS_THINKING = "clear_thinking_"
_EDIT = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "pattern": f"^{_CLEARS_THINKING}"}},
}
ContextManagement = Annotated[
    None,
    PlainValidator(_context),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"edits": {"anyOf": [{"type": "null"}, {"type": "array", "items": _EDIT}]}},
                },
            ]
        }
    ),
]


class CountTokensRequest(StrictModel):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"}
    )
    """Fields that change nothing about the answer; `cache_control` does so wherever it stands."""

    model: str
    messages: Messages
    system: System = None
    tools: MessagesTools = None
    """Functions that the model may call."""
    tool_choice: MessagesChoice = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None
    context_management: ContextManagement = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: further arguments of the model's chat template; they go before `thinking`."""

    @property
    def tool_set(self) -> MessagesToolSet:
        """The tools, also where there are none."""
        return self.tools or MessagesToolSet()

    def translation(self) -> Translation:
        """What it asks in the words of the chat API."""
        return Translation.model_construct(**self._translated())

    def _translated(self) -> dict[str, Any]:
        turns, thinking, picked = self.messages, self.thinking, self.tool_choice
        last = turns[-1]
        return {
            "model": self.model,
            "spoken": opened(self.system, turns),
            "tools": self.tool_set.functions or None,
            "tool_choice": picked.choice if picked else None,
            "parallel_tool_calls": picked.parallel if picked else None,
            "reasoning_effort": self.output_config.effort if self.output_config else None,
            "include_reasoning": False if thinking and thinking.display == "omitted" else None,
            "chat_template_kwargs": {
                **({"enable_thinking": thinking.type != "disabled"} if thinking else {}),
                **(self.chat_template_kwargs or {}),
            },
            # An answer that the client has begun is gone on with.
            "continue_final_message": last["role"] == "assistant" and "tool_calls" not in last,
        }


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}

    max_tokens: int = Field(ge=1)
    stop_sequences: Stop = ()
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stream: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Extension: lower goes first, as in vLLM."""
    cache_salt: str | None = Field(default=None, min_length=1)
    """Extension: as in /v1/chat/completions."""

    def _translated(self) -> dict[str, Any]:
        form = self.output_config.format if self.output_config else None
        return {
            **super()._translated(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "response_format": None
            if form is None
            else ResponseFormat.model_construct(
                type="json_schema", json_schema=JsonSchema.model_construct(json_schema=form.json_schema)
            ),
        }


Kind = TypeVar("Kind", bound=CountTokensRequest)


def parse_messages(kind: type[Kind], document: Any, *, ignore_unknown: bool) -> tuple[Kind, Translation]:
    """A body (decoded JSON), and what it asks in the words of the chat API.

    Raises:
        ApiError: 400, naming the first field that is wrong and what it may be.
    """
    request = parse_fields(kind, document, ignore_unknown=ignore_unknown)
    translation = request.translation()
    check_others(
        request.tool_set.others,
        request.tool_choice.choice if request.tool_choice else None,
        ignore_unknown=ignore_unknown,
        instead="leave it out, or offer a tool with an 'input_schema'",
    )
    check_tools(translation)
    check_template(translation)
    return request, translation


def read_count(document: Any, ignore_unknown: bool) -> Translation:
    """A body of POST /v1/messages/count_tokens."""
    return parse_messages(CountTokensRequest, document, ignore_unknown=ignore_unknown)[1]
