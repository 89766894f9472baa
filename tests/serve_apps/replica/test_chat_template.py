"""Other people's chat templates and tokenizers: whatever one does with a conversation, its client is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.errors import ApiError
from serve_apps.openai.parse import parse
from serve_apps.replica.prompts import Prompts
from tests.serve_apps.tiny_model import make_tokenizer

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CALLS = "{% for c in messages[1].tool_calls %}{{ BODY }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def prompts(directory: Path, template: str | dict[str, str] | None) -> Prompts:
    """A tokenizer with these chat templates, as it is read from its directory."""
    from transformers import AutoTokenizer

    make_tokenizer(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return Prompts(str(directory))


def text(reads: Prompts, *messages: dict[str, Any], **fields: Any) -> str:
    said = [{"role": "user", "content": "hi"}, *messages]
    request = parse(ChatRequest, {"model": "chat", "messages": said, **fields})
    assert isinstance(request, ChatRequest)
    turns = [message.for_template() for message in request.messages]
    return reads.decode(reads.encode({"messages": turns, "template": request.template()}))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{{ messages[7]['content'] }}", "messages"),
        ("{% if messages %}{{ strftime_now(1) }}{% endif %}", "Error"),
        ("{{ messages[0].content.encode('ascii').fail() }}", "."),
    ],
)
def test_whatever_fails_in_a_template_is_the_clients_to_know(
    tmp_path: Path, template: str, says: str
) -> None:
    with pytest.raises(ApiError, match=r"do not suit this model's chat template: .") as refused:
        text(prompts(tmp_path, template))
    assert says in refused.value.message
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_text_that_the_tokenizer_cannot_read_is_the_clients_to_know(tmp_path: Path) -> None:
    lone = json.loads('"\\ud83d"')  # half an emoji, as a client sends it that cuts strings in the middle
    reads = prompts(tmp_path, TURN)
    for request, param in (
        ({"prompt": lone}, "prompt"),
        ({"messages": [{"role": "user", "content": lone}]}, "messages"),
    ):
        with pytest.raises(ApiError, match="cannot read") as refused:
            reads.encode(request)
        assert (refused.value.status, refused.value.param) == (400, param)


def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    reads = prompts(tmp_path, {"default": TURN, "tool_use": f"tools!{TURN}", "rag": "{{ 1 // 0 }}"})
    assert text(reads) == "<user>hi"
    assert text(reads, tools=TOOLS) == "tools!<user>hi"
    assert text(reads, tools=[]) == "<user>hi"


def test_a_single_template_is_taken_whatever_its_name_and_none_of_several_is_guessed(tmp_path: Path) -> None:
    assert text(prompts(tmp_path / "one", {"default": TURN}), tools=TOOLS) == "<user>hi"
    assert text(prompts(tmp_path / "odd", {"mine": TURN})) == "<user>hi"
    with pytest.raises(ApiError, match="mine, yours"):
        text(prompts(tmp_path / "two", {"mine": TURN, "yours": TURN}))


def test_a_tokenizer_without_a_template_gets_ours(tmp_path: Path) -> None:
    assert text(prompts(tmp_path, None)) == "user: hi\nassistant:"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}", "a=1;b=x;"),
        ("{{ c.function.arguments | tojson }}", '{"a": 1, "b": "x"}'),
    ],
)
def test_templates_see_arguments_as_objects(tmp_path: Path, body: str, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}}
    reads = prompts(tmp_path, CALLS.replace("{{ BODY }}", body))
    assert text(reads, {"role": "assistant", "content": None, "tool_calls": [call]}) == shown


ASKED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ASKED += (
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking | default(true) %}<quick>{% endif %}"
)
ASKED += "{{ reasoning_effort | default('') }}{% endif %}"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "<user>hi<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>hi<assistant><quick>"),
        ({"reasoning_effort": "low"}, "<user>hi<assistant>low"),
        ({"reasoning_effort": "none"}, "<user>hi<assistant><quick>none"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "<user>hi<assistant>none",
        ),
    ],
)
def test_a_request_says_what_the_template_is_given(
    tmp_path: Path, fields: dict[str, Any], shown: str
) -> None:
    assert text(prompts(tmp_path, ASKED), **fields) == shown


def test_an_answer_may_go_on_with_the_last_message(tmp_path: Path) -> None:
    closed = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    begun = {"role": "assistant", "content": "The capital is"}
    found = text(prompts(tmp_path, closed), begun, continue_final_message=True)
    assert found == "<user>hi</s><assistant>The capital is"


def test_tools_that_may_not_be_called_are_not_shown(tmp_path: Path) -> None:
    shows = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    reads = prompts(tmp_path, "." + shows)
    two = [{"type": "function", "function": {"name": name}} for name in ("add", "take")]
    assert text(reads, tools=two) == ".add take "
    assert text(reads, tools=two, tool_choice="none") == "."
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [two[1]]}}
    assert text(reads, tools=two, tool_choice=only) == ".take "


def test_a_developers_turn_is_the_systems_where_the_template_knows_no_such_role(tmp_path: Path) -> None:
    turn = {"role": "developer", "content": "Be brief."}
    assert text(prompts(tmp_path / "new", ASKED), turn) == "<user>hi<system>Be brief.<assistant>"
    knows = ASKED + "{# developer #}"
    assert text(prompts(tmp_path / "old", knows), turn) == "<user>hi<developer>Be brief.<assistant>"


def test_reasoning_of_earlier_turns_has_the_name_that_templates_read(tmp_path: Path) -> None:
    reads = prompts(tmp_path, "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")
    for name in ("reasoning", "reasoning_content"):
        assert text(reads, {"role": "assistant", "content": "4", name: "2 + 2"}) == "2 + 2"
