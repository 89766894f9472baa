"""From a request's JSON to its fields, with a sentence for each field that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from serve_apps.openai.chat_schema import OWN_ARGUMENTS, ChatRequest, Conversation
from serve_apps.openai.errors import ApiError, bad_request, shortened
from serve_apps.openai.fields import UNKNOWN_FIELD
from serve_apps.openai.schema import Request
from serve_apps.openai.text_schema import PAIRS, ScoreRequest, TokenizeRequest

Kind = TypeVar("Kind", bound=BaseModel)


def parse_fields(kind: type[Kind], document: Any, *, ignore_unknown: bool = False) -> Kind:
    """The request in `document` (decoded JSON), as the fields of its kind say.

    A field that is null was not given, and one that is not known and empty asks for nothing: clients send
    all the fields that they have.

    Args:
        ignore_unknown: other fields that are not known are passed over too; else they are refused.

    Raises:
        ApiError: 400, naming the first field that is wrong and what it may be.
    """
    if not isinstance(document, dict):
        raise bad_request(f"The request body must be a JSON object, not {_kind_of(document)}.")
    ignored: frozenset[str] = getattr(kind, "IGNORED", frozenset())
    neutral: Mapping[str, tuple[Any, ...]] = getattr(kind, "NEUTRAL", {})
    replaced: Mapping[str, str] = getattr(kind, "REPLACED", {})
    why: Mapping[str, str] = getattr(kind, "WHY", {})
    fields, given = kind.model_fields, dict[str, Any]()
    for name, value in document.items():
        known = name in fields
        if value is None or name in ignored:
            continue
        if name in replaced:
            raise bad_request(
                f"'{name}' is not supported by this server; send '{replaced[name]}' in its place.",
                param=name,
                code="unsupported_parameter",
            )
        if name in neutral:
            _check_neutral(name, value, neutral[name], why.get(name, "leave it out"))
        elif known or not (ignore_unknown or value in _EMPTY):
            given[name] = value
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _sentence(error) from None


def parse(kind: type[Request], document: Any, *, ignore_unknown: bool = False) -> Request:
    """As `parse_fields`, of a request that generates; what its fields say together is checked too."""
    request = parse_fields(kind, document, ignore_unknown=ignore_unknown)
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    if isinstance(request, ChatRequest):
        _check_messages(request)
        check_tools(request)
        check_template(request)
    form = request.response_format
    if (
        form is not None
        and form.type == "json_schema"
        and (form.json_schema is None or form.json_schema.json_schema is None)
    ):
        path = "response_format.json_schema.schema"
        raise bad_request(f"'{path}' is required.", param=path, code="missing_required_parameter")
    check_structure(request)
    _check_prompt_fields(request)
    if request.min_tokens and request.most_tokens is not None and request.min_tokens > request.most_tokens:
        raise bad_request(
            f"'min_tokens' is {request.min_tokens}, above '{request.most_tokens_field}', which is"
            f" {request.most_tokens}.",
            param="min_tokens",
            code="invalid_value",
        )
    if request.include_usage and not request.streamed:
        raise bad_request("'stream_options' needs 'stream': true.", param="stream_options")
    return request


_EMPTY: tuple[Any, ...] = ([], {}, "")


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...], why: str) -> None:
    # 0 == False in Python, but a penalty of `false` is a mistake: the types must agree too.
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        raise bad_request(
            f"'{name}' is not supported by this server; {why}.",
            param=name,
            code="unsupported_parameter",
        )


def parse_score(document: Any, ignore_unknown: bool) -> tuple[ScoreRequest, list[str], list[str]]:
    """A request for scores, and the texts of its pairs.

    Raises:
        ApiError: 400, as `parse_fields`; or the texts make no pairs.
    """
    request = parse_fields(ScoreRequest, document, ignore_unknown=ignore_unknown)
    names = {name for pair in PAIRS for name in pair if getattr(request, name) is not None}
    pair = next((pair for pair in PAIRS if names == set(pair)), None)
    if pair is None:
        known = ", or ".join(" and ".join(f"'{name}'" for name in pair) for pair in PAIRS)
        raise bad_request(f"Send {known}.", code="missing_required_parameter")
    first, second = getattr(request, pair[0]), getattr(request, pair[1])
    if len(first) not in (1, len(second)):
        raise bad_request(
            f"'{pair[0]}' has {len(first)} texts, '{pair[1]}' {len(second)}; it must have one, or as many.",
            param=pair[0],
            code="invalid_value",
        )
    return request, first, second


def check_tokenize(request: TokenizeRequest) -> None:
    """Raise ApiError where a request's fields do not go together."""
    if (request.messages is None) == (request.prompt is None):
        said = "or" if request.messages is None else "and not both:"
        raise bad_request(f"Send 'prompt' {said} 'messages'.", code="missing_required_parameter")
    of_messages = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
    lone = next((name for name in of_messages if getattr(request, name)), None)
    if request.messages is None and lone is not None:
        raise bad_request(f"'{lone}' needs 'messages'.", param=lone, code="invalid_value")
    check_template(request)


_LOST_IN_TEMPLATES = {
    "audio": "audio is not supported",
    "function_call": "send calls as 'tool_calls'",
}
"""Fields of a turn that say something, and that no chat template shows to the model."""


def check_structure(request: Request, form_field: str = "response_format") -> None:
    """Refuse more than one structure.

    Args:
        form_field: what the API calls `response_format`.

    Raises:
        ApiError
    """
    structure, form = request.structured_outputs, request.response_format
    if structure is None:
        return
    given = structure.given
    if len(given) != 1:
        said = f"not {' and '.join(given)}" if given else "and none is given"
        raise bad_request(
            f"'structured_outputs' takes one of json, json_object, regex, choice, grammar, {said}.",
            param="structured_outputs",
            code="invalid_value",
        )
    if form is not None and form.type != "text":
        raise bad_request(
            f"'structured_outputs' and '{form_field}' both say what form the answer has; send one of them.",
            param="structured_outputs",
            code="invalid_value",
        )


def _check_prompt_fields(request: Request) -> None:
    """Check what is asked of prompts, and not of answers."""
    if request.prompt_logprobs is not None and request.streamed:
        raise bad_request(
            "'prompt_logprobs' is not available with 'stream': true; 'echo' with 'logprobs' is.",
            param="prompt_logprobs",
            code="invalid_value",
        )
    if request.truncate_prompt_tokens == 0:
        raise bad_request(
            "'truncate_prompt_tokens' is 0, which leaves no prompt; it must be -1, or 1 or more.",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    if request.max_tokens == 0 and not request.echoes:
        raise bad_request(
            "'max_tokens' is 0, which needs 'echo': true.", param="max_tokens", code="invalid_value"
        )


def _check_messages(request: ChatRequest) -> None:
    for number, message in enumerate(request.messages):
        said = message.for_template()
        if lost := next((name for name in _LOST_IN_TEMPLATES if name in said), None):
            path = f"messages.{number}.{lost}"
            what = f"'{path}' cannot be shown to the model: {_LOST_IN_TEMPLATES[lost]}."
            raise bad_request(what, param=path, code="unsupported_parameter")
        if "content" not in message.model_fields_set and message.tool_calls is None:
            raise bad_request(
                f"'messages.{number}.content' is required.",
                param=f"messages.{number}.content",
                code="missing_required_parameter",
            )


def check_tools(request: Conversation) -> None:
    """Refuse what `tools` and `tool_choice` do not say together.

    Raises:
        ApiError
    """
    choice, tools = request.choice, request.tools or []
    if choice.forced and not tools:
        what = "'tool_choice' asks for a call, but there are no 'tools'."
        raise bad_request(what, param="tool_choice", code="invalid_value")
    names = Counter(tool["function"]["name"] for tool in tools)
    if unknown := next((name for name in choice.names if name not in names), None):
        raise bad_request(
            f"'tool_choice' names the function '{shortened(unknown)}', which is none of 'tools'.",
            param="tool_choice",
            code="invalid_value",
        )
    twice, times = names.most_common(1)[0] if names else ("", 1)
    if times > 1:
        what = f"{times} of 'tools' are named '{shortened(twice)}'."
        raise bad_request(what, param="tools", code="invalid_value")


def check_template(request: Conversation | TokenizeRequest) -> None:
    """Refuse what is said of the chat template and cannot be.

    Raises:
        ApiError
    """
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_request(
            "'continue_final_message' leaves the last message open, and 'add_generation_prompt' begins"
            " another; ask for one of them.",
            param="continue_final_message",
        )
    if own := next((name for name in request.chat_template_kwargs or () if name in OWN_ARGUMENTS), None):
        raise bad_request(
            f"'chat_template_kwargs' must not hold '{own}'.",
            param="chat_template_kwargs",
            code="invalid_value",
        )


def _sentence(error: ValidationError) -> ApiError:
    """The first mistake as a sentence about the request's own field."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    parts = [str(part) for part in first["loc"]]
    if kind == UNKNOWN_FIELD:
        path = ".".join([*parts, shortened(first["ctx"]["name"])])
        return bad_request(f"Unknown parameter '{path}'.", param=path, code="unknown_parameter")
    path, field = ".".join(parts), parts[0] if parts else None
    if kind == "missing":
        return bad_request(f"'{path}' is required.", param=path, code="missing_required_parameter")
    says: Mapping[str, Callable[[], str]] = {
        "too_short": lambda: "must not be empty",
        "value_error": lambda: str(first["ctx"]["error"]),
        "bool_type": lambda: "must be true or false",
        "string_type": lambda: "must be a string",
        "int_type": lambda: "must be an integer",
        "float_type": lambda: "must be a number",
        "none_required": lambda: "it is not supported by this server; leave it out",
    }
    message = says[kind]() if kind in says else first["msg"][0].lower() + first["msg"][1:]
    return bad_request(
        f"'{path}' is wrong: {message} (given: {_short(first['input'])}).",
        param=field,
        code="invalid_type" if kind.endswith("_type") else "invalid_value",
    )


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return _kind_of(value)
    return shortened(repr(value))


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
