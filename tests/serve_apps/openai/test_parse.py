"""What clients send as it comes: dumps with every field they know, nulls, empty lists, others' fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.errors import ApiError
from serve_apps.openai.parse import parse, parse_fields
from serve_apps.openai.schema import CompletionRequest, Request
from serve_apps.openai.text_schema import (
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)

HELLO = {"role": "user", "content": "hello"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'},
}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    request = parse(ChatRequest, {"model": "chat", "messages": [HELLO, *messages], **fields})
    assert isinstance(request, ChatRequest)
    return request


def turn(message: dict[str, Any]) -> dict[str, Any]:
    """What a chat template gets to see of a message."""
    return chat(message).messages[1].for_template()


def dumped(**message: Any) -> dict[str, Any]:
    """An answer's message as openai-python hands it back."""
    answer = ChatCompletion.model_validate(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "chat",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "logprobs": None,
                    "message": {"role": "assistant", "content": None, "refusal": None, **message},
                }
            ],
        }
    )
    return answer.choices[0].message.model_dump()


def test_an_answer_is_taken_back_as_openais_client_dumps_it() -> None:
    message = dumped(content="Hi")
    assert {"annotations", "audio", "function_call", "tool_calls"} <= message.keys()
    assert turn(message) == {"role": "assistant", "content": "Hi"}


def test_a_call_is_taken_back_with_its_arguments_as_an_object() -> None:
    assert turn(dumped(tool_calls=[CALL])) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
            }
        ],
    }
    given = {**CALL, "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    assert turn(dumped(content="") | {"tool_calls": [given]})["tool_calls"] == [given]
    for nothing in ({"name": "now"}, {"name": "now", "arguments": ""}, {"name": "now", "arguments": None}):
        (call,) = turn(dumped(content="") | {"tool_calls": [{"function": nothing}]})["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": {}}


def test_what_other_clients_add_to_a_message_reaches_the_template_unless_it_is_empty() -> None:
    message = {
        "role": "assistant",
        "content": "4",
        "id": "msg-1",
        "provider_specific_fields": {},
        "thinking_blocks": [],
        "reasoning_content": "2 + 2",
        "images": None,
    }
    said = {"role": "assistant", "content": "4", "id": "msg-1", "reasoning_content": "2 + 2"}
    assert turn(message) == said


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"city": "Bern", "days": 2, "from": "Zür', {"city": "Bern", "days": 2}),
        ('{"city": "Bern", "days": ', {"city": "Bern"}),
        ("{", {}),
        ("not JSON", {}),
        ("[1]", {}),
        ("NaN", {}),
        ('{"days": 1e999}', {}),
        ("[" * 100_000, {}),
    ],
)
def test_arguments_that_a_model_wrote_badly_do_not_end_the_conversation(
    written: str, read: dict[str, Any]
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": written}}
    (said,) = turn({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert said["function"] == {"name": "f", "arguments": read}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
        (
            [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}],
            "ab",
        ),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([], ""),
    ],
)
def test_parts_that_are_text_are_joined(parts: list[dict[str, Any]], text: str) -> None:
    assert turn({"role": "user", "content": parts})["content"] == text


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "user", "content": [{"type": [], "text": "a"}]}, "messages", "text parts"),
        ({"role": "user", "content": ["a"]}, "messages", "text parts"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages", "images"),
        ({"role": "assistant", "tool_calls": "x"}, "messages", "list of calls"),
        ({"role": "assistant", "tool_calls": [{"function": "x"}]}, "messages", "call 0"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "messages",
            "obj",
        ),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
            "messages.1.function_call",
            "tool_calls",
        ),
        ({"role": "assistant", "content": "", "audio": {"id": "a"}}, "messages.1.audio", "audio"),
    ],
)
def test_what_the_model_would_never_see_is_refused_in_words(
    message: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        chat(message)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 5, "max_completion_tokens": 4}, "min_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert chat(min_tokens=4, max_tokens=4).most_tokens == 4


def test_no_messages_are_refused_in_words() -> None:
    with pytest.raises(ApiError, match=r"'messages' is wrong: must not be empty \(given: a list\)"):
        parse(ChatRequest, {"model": "chat", "messages": []})


KINDS: dict[type[Any], dict[str, Any]] = {
    CompletionRequest: {"model": "chat", "prompt": "a"},
    ChatRequest: {"model": "chat", "messages": [HELLO]},
    EmbeddingRequest: {"model": "chat", "input": "a"},
    PoolingRequest: {"model": "chat", "input": "a"},
    ScoreRequest: {"model": "chat", "text_1": "a", "text_2": "b"},
    RerankRequest: {"model": "chat", "query": "a", "documents": ["b"]},
    TokenizeRequest: {"model": "chat", "prompt": "a"},
    DetokenizeRequest: {"model": "chat", "tokens": [1]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_that_is_null_was_not_given(kind: type[Any]) -> None:
    needed = KINDS[kind]
    known = {*kind.model_fields, *getattr(kind, "NEUTRAL", ()), *kind.IGNORED, "of_another_server"}
    read = parse if issubclass(kind, Request) else parse_fields
    assert read(kind, dict.fromkeys(known) | needed) == read(kind, needed)
    for name in (name for name in needed if kind.model_fields[name].is_required()):
        with pytest.raises(ApiError, match=f"'{name}' is required"):
            read(kind, {**needed, name: None})


@given(
    st.dictionaries(
        st.text("abcxyz_", min_size=4), st.sampled_from([None, [], {}, ""]), min_size=1, max_size=5
    )
)
def test_unknown_fields_that_ask_for_nothing_pass(extra: dict[str, Any]) -> None:
    for kind, needed in KINDS.items():
        assert parse_fields(kind, {**extra, **needed}) == parse_fields(kind, needed)


def test_unknown_fields_that_ask_for_something_are_refused_or_ignored_as_the_config_says() -> None:
    for kind, needed in KINDS.items():
        document = {**needed, "num_ctx": 4096}
        with pytest.raises(ApiError, match="Unknown parameter 'num_ctx'"):
            parse_fields(kind, document)
        assert parse_fields(kind, document, ignore_unknown=True) == parse_fields(kind, needed)


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [], "return_tokens_as_token_ids": False, "return_token_ids": False},
        {"skip_special_tokens": True, "use_beam_search": False, "best_of": 1, "length_penalty": 1.0},
        {"spaces_between_special_tokens": True, "include_stop_str_in_output": False, "echo": False},
    ],
)
def test_vllms_defaults_ask_for_nothing(fields: dict[str, Any]) -> None:
    for kind in (CompletionRequest, ChatRequest):
        with_them, without = parse(kind, {**KINDS[kind], **fields}), parse(kind, KINDS[kind])
        assert with_them.sampling() == without.sampling()
        assert with_them.prompt_options() == without.prompt_options() == {}
    assert parse(CompletionRequest, {**KINDS[CompletionRequest], "top_logprobs": 0})


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0},
        {"top_logprobs": 0, "logprobs": False},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}, "stream": False},
        {"stop": ""},
        {"stop": []},
    ],
    ids=str,
)
def test_a_known_field_may_ask_for_nothing_too(fields: dict[str, Any]) -> None:
    with_them, without = chat(**fields), chat()
    assert with_them.sampling() == without.sampling()
    assert (with_them.include_usage, with_them.alternatives) == (False, None)


def test_what_is_empty_in_a_turn_was_not_said() -> None:
    nothing = {"audio": "", "function_call": {"name": None, "arguments": None}, "name": "", "refusal": ""}
    said = turn({"role": "assistant", "content": "4", "tool_call_id": "", "annotations": [], **nothing})
    assert said == {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
def test_fields_that_vllm_has_given_up_name_what_took_their_place(name: str) -> None:
    for ignore in (False, True):
        with pytest.raises(ApiError, match=rf"send 'structured_outputs\.{name}'") as refused:
            parse(ChatRequest, {**KINDS[ChatRequest], f"guided_{name}": "a"}, ignore_unknown=ignore)
        assert refused.value.param == f"guided_{name}"
    assert parse(ChatRequest, {**KINDS[ChatRequest], f"guided_{name}": None})


@pytest.mark.parametrize(
    ("structure", "sampling"),
    [
        ({"json": {"type": "integer"}, "regex": None}, {"json_schema": '{"type": "integer"}'}),
        ({"json": '{"type":"integer"}'}, {"json_schema": '{"type":"integer"}'}),
        ({"json_object": True}, {"json_schema": '{"type": "object"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"regex": ""}, {"regex": ""}),
        ({"choice": ["a", ""]}, {"choice": ("a", "")}),
        ({"grammar": "root ::= 'a'", "disable_any_whitespace": False}, {"grammar": "root ::= 'a'"}),
    ],
    ids=str,
)
def test_structures_reach_the_engine(structure: dict[str, Any], sampling: dict[str, Any]) -> None:
    request = chat(structured_outputs=structure)
    found = {name: value for name, value in request.sampling().items() if name in sampling}
    assert found == sampling
    assert request.prompt_options() == {"structure_field": "structured_outputs"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "none is given"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "none is given"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "1 to 4096 strings"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs", "1 to 4096 strings"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "send one of them",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs",
            "structural_tag.*not supported",
        ),
        ({"structured_outputs": {"regex": "a", "nonsense": 1}}, "structured_outputs.nonsense", "nonsense"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "pattern"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "json_schema"),
        ({"bad_words": ["a"] * 129}, "bad_words", "at most 128 words"),
        ({"bad_words": ["a" * 257]}, "bad_words", "256 characters"),
        ({"bad_words": [" "]}, "bad_words", "words"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", "4096"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "greater"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "no prompt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
        ({"truncation_side": "middle"}, "truncation_side", "left"),
        ({"max_tokens": 0}, "max_tokens", "."),
    ],
    ids=str,
)
def test_what_the_fields_of_vllm_may_not_be(fields: dict[str, Any], param: str, says: str) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(ApiError, match=says) as refused:
            parse(kind, {**KINDS[kind], **fields})
        assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"echo": True}, None),
        ({"echo": True, "max_tokens": 0}, 0),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 1),
        ({"logprobs": 3}, None),
        ({"prompt_logprobs": 0}, 0),
    ],
    ids=str,
)
def test_the_logprobs_of_prompts_are_computed_where_they_are_shown(
    fields: dict[str, Any], asked: int | None
) -> None:
    request = parse(CompletionRequest, {**KINDS[CompletionRequest], **fields})
    assert request.sampling().get("prompt_logprobs") == asked


@pytest.mark.parametrize("name", sorted({*ChatRequest.NEUTRAL, *CompletionRequest.NEUTRAL}))
def test_what_is_not_carried_out_is_refused_where_it_asks_for_something(name: str) -> None:
    for kind in (CompletionRequest, ChatRequest):
        if name in kind.NEUTRAL:
            with pytest.raises(ApiError, match=f"'{name}' is not supported") as refused:
                parse(kind, {**KINDS[kind], name: json.loads('{"anything": 1}')})
            assert refused.value.code == "unsupported_parameter"
