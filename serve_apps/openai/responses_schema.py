"""The request of /v1/responses, and what it asks in the words of the chat API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from serve_apps.openai.chat_schema import Effort, Translation
from serve_apps.openai.errors import bad_request
from serve_apps.openai.fields import MAX_LOGPROBS, Stop, StrictModel
from serve_apps.openai.parse import check_structure, check_template, check_tools, parse_fields
from serve_apps.openai.responses_items import Input
from serve_apps.openai.responses_tools import OfferedTools, ResponsesTools, check_others
from serve_apps.openai.schema import JsonSchema, ResponseFormat, StructuredOutputs
from serve_apps.openai.tools import Choice
from serve_apps.openai.turns import opened

LOGPROBS = "message.output_text.logprobs"
MOST_LEVELS = 128
"""Levels of a schema that an answer repeats."""
KEEPS_NONE = "it keeps no answers: send the whole conversation as 'input'"


def _strings(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError("must be an object whose values are strings")
    return value


Metadata = Annotated[
    dict[str, str] | None,
    PlainValidator(_strings),
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"type": "string"}}]}
    ),
]


class _Advice(BaseModel):
    """Settings of which some change nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextForm(_Advice):
    """What form the answer's text must have; `name`, `description` and `strict` change nothing."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    # `schema` is a method of pydantic's.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(StrictModel):
    """Of the answer's text."""

    format: TextForm | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Changes nothing."""


class ReasoningSettings(_Advice):
    """Of the reasoning; `summary` changes nothing, as all of it is told."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(StrictModel):
    """The body of POST /v1/responses."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user"),
        }
    )
    """Fields that change nothing about the answer."""
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
    }
    WHY: ClassVar[Mapping[str, str]] = {
        "background": "it answers while the client waits, or streams",
        "conversation": KEEPS_NONE,
        "previous_response_id": KEEPS_NONE,
        "prompt": "it keeps no prompts: send what the prompt says as 'instructions' and 'input'",
    }
    """What to do instead."""

    model: str
    input: Input
    instructions: str | None = None
    """Comes before the input, as a turn of the system's."""
    tools: ResponsesTools = None
    """Functions that the model may call, alone or in namespaces."""
    tool_choice: Choice = None
    """Whether it calls them: none, auto (the default), required, or one by its name."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; the default is yes."""
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: tuple[str, ...] | None = Field(default=None, strict=False, fail_fast=True)
    """`message.output_text.logprobs` is known; what others ask for is in no answer."""
    truncation: Literal["auto", "disabled"] | None = None
    """Nothing is cut off: a conversation that is too long is refused, also with `auto`."""
    store: bool | None = None
    """Nothing is stored, whatever it says, and the answer says so."""
    metadata: Metadata = None
    """Is repeated in the answer."""
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: further arguments of the model's chat template, like `enable_thinking`."""
    structured_outputs: StructuredOutputs | None = None
    """Extension: what form the answer has, as in vLLM."""
    top_k: int | None = Field(default=None, ge=-1)
    """Extension: only the k likeliest tokens; 0 and -1 keep all."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Extension."""
    stop: Stop = ()
    """Extension."""
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Extension: lower goes first, as in vLLM."""
    cache_salt: str | None = Field(default=None, min_length=1)
    """Extension: as in /v1/chat/completions."""

    @property
    def offered(self) -> OfferedTools:
        """The tools, also where there are none."""
        return self.tools or OfferedTools()

    def translation(self) -> Translation:
        """What it asks in the words of the chat API."""
        return Translation.model_construct(
            model=self.model,
            spoken=opened(self.instructions, self.input),
            tools=self.offered.functions or None,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=self._form(),
            max_tokens=self.max_output_tokens,
            length_field="max_output_tokens",
            temperature=self.temperature,
            top_p=self.top_p,
            reported=self._reported(),
            stream=self.stream,
            chat_template_kwargs=self.chat_template_kwargs,
            structured_outputs=self.structured_outputs,
            top_k=self.top_k,
            seed=self.seed,
            stop=self.stop,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )

    def _form(self) -> ResponseFormat | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        schema = JsonSchema.model_construct(json_schema=form.json_schema)
        return ResponseFormat.model_construct(type=form.type, json_schema=schema)

    def _reported(self) -> int | None:
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return self.top_logprobs or None


def parse_response(document: Any, *, ignore_unknown: bool) -> tuple[ResponsesRequest, Translation]:
    """A body of POST /v1/responses (decoded JSON), and what it asks in the words of the chat API.

    Raises:
        ApiError: 400, naming the first field that is wrong and what it may be.
    """
    request = parse_fields(ResponsesRequest, document, ignore_unknown=ignore_unknown)
    form = request.text.format if request.text else None
    translation = request.translation()
    check_others(
        request.offered.others,
        request.tool_choice,
        ignore_unknown=ignore_unknown,
        instead="leave it out, or offer a function of your own",
    )
    check_tools(translation)
    check_template(translation)
    check_structure(translation, form_field="text.format")
    _check_depth("tools", list(request.offered.given))
    _check_depth("text", form.json_schema if form else None)
    if form is not None and form.type == "json_schema" and form.json_schema is None:
        path = "text.format.schema"
        raise bad_request(f"'{path}' is required.", param=path, code="missing_required_parameter")
    return request, translation


def read_input(document: Any, ignore_unknown: bool) -> Translation:
    """A body of POST /v1/responses/input_tokens."""
    return parse_response(document, ignore_unknown=ignore_unknown)[1]


def _check_depth(field: str, value: Any) -> None:
    """Refuse what is nested so deeply that an answer could not repeat it."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inside
            for one in level
            if isinstance(one, dict | list)
            for inside in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise bad_request(
        f"'{field}' is nested more than {MOST_LEVELS} levels deep.", param=field, code="invalid_value"
    )
