"""Conversations with engine: vllm are rendered and read by vLLM's own serving layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.serve import ServeAppConfig
from serve_apps.engine.answer import Answer
from serve_apps.engine.protocol import EngineConfig, PromptError, SamplingParams, UnsupportedError
from serve_apps.engine.vllm_engine import VllmEngine
from serve_apps.replica.chat import Chat, chat_of, engines_reasoning
from serve_apps.replica.item_maker import ItemMaker
from serve_apps.replica.items import item_of, items
from serve_apps.replica.prompts import Prompts
from serve_apps.tokens.inbox import Item, merge
from tests.serve_apps.engine.conftest import Asker, needs_vllm, save_llama

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]

TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>{"name": x, "arguments": y}</tool_call>{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}
{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}
{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}</think>"""
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASKED = {"functions": [WEATHER], "mode": "auto", "name": None, "parallel": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer, LlamaForCausalLM

    path = tmp_path_factory.mktemp("vllm-chat") / "model"
    save_llama(path, hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(MARKS)
    tokenizer.chat_template = TEMPLATE.replace("{% endif %}</think>", "{% endif %}{# </think> #}")
    tokenizer.save_pretrained(path)
    model = LlamaForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts(path: Path) -> Prompts:
    return Prompts(str(path))


@pytest.fixture(scope="module")
def asker(path: Path, prompts: Prompts) -> Iterator[Asker]:
    config = EngineConfig(
        str(path),
        max_batch=4,
        kv_cache_bytes=2**26,
        reasoning=engines_reasoning(prompts, app()),
        extra={"enforce_eager": True},
    )
    asker = Asker(VllmEngine(config))
    asker.run(asker.engine.start(), 200)
    yield asker
    asker.close()


def app(**fields: Any) -> ServeAppConfig:
    return ServeAppConfig(model="m", engine="vllm", **fields)


@pytest.fixture
def chat(asker: Asker, prompts: Prompts) -> Chat:
    return chat_of(asker.engine, prompts, app())


def test_a_conversation_is_rendered_by_the_models_template(
    asker: Asker, prompts: Prompts, chat: Chat
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "北京"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    for asked in ({}, {"arguments": {"enable_thinking": True}}, {"no_generation_prompt": True}):
        found = asker.run(chat.encode({"messages": messages, "template": asked}))
        text = prompts.template.render(messages, asked)
        assert prompts.decode(found) == text


def test_a_conversation_that_is_too_long_is_cut_where_that_is_asked_for(
    asker: Asker, prompts: Prompts, chat: Chat
) -> None:
    request = {"messages": [{"role": "user", "content": "fish " * 600}], "template": {}}
    with pytest.raises(PromptError, match="context length"):
        asker.run(chat.encode(request))
    whole = prompts.encode(request)
    assert asker.run(chat.encode({**request, "cut": 5})) == whole[-5:]
    assert asker.run(chat.encode({**request, "cut": 5, "cut_side": "right"})) == whole[:5]


def test_a_template_that_refuses_says_why(asker: Asker, chat: Chat) -> None:
    with pytest.raises(PromptError, match="render"):
        asker.run(chat.encode({"messages": [{"role": "user", "content": "hi"}], "template": {"tools": [1]}}))


def read(chat: Chat, prompts: Prompts, asked: dict[str, Any], prompt: str, text: str) -> Item:
    """What a gateway would learn of an answer whose tokens are these."""
    reader, _ = chat.read({"reading": asked, "sampling": {}}, prompts.encode({"prompt": prompt}))
    assert reader is not None
    ids = prompts.encode({"prompt": text})
    told = []
    for number, token in enumerate(ids):
        one = reader.read(prompts.decode([token]), [token], finished=number == len(ids) - 1)
        told.append({"text": one.text, "token_ids": (token,), "reasoning": one.reasoning, "calls": one.calls})
    return merge(told)


def test_calls_and_reasoning_are_read_by_vllms_parsers(prompts: Prompts, chat: Chat) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    found = read(chat, prompts, ASKED, "<think>", f"Hm.</think>{call}")
    assert found["reasoning"] == "Hm."
    assert found["calls"][0][2] == "get_weather"
    assert json.loads("".join(piece for *_, piece in found["calls"])) == {"city": "Paris"}


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1", "step3"])
def test_reasoning_is_counted_whether_it_is_told_or_not(asker: Asker, prompts: Prompts, parser: str) -> None:
    chat = chat_of(asker.engine, prompts, app(reasoning=parser))
    prompt = prompts.encode({"prompt": "<think>"})
    # The character comes in several tokens, all but the last of which tell nothing.
    thought = prompts.encode({"prompt": "Hm \N{TEAPOT}.</think>"})
    ids = [*thought, *prompts.encode({"prompt": "Yes \N{TEAPOT}."})]

    def told(asked: dict[str, Any]) -> Item:
        sampling = SamplingParams(skip_special_tokens=False)
        answer = Answer(prompts.tokenizer, prompt, sampling, lambda token: prompts.piece(token)[1])
        reader, _ = chat.read({"reading": asked, "sampling": {}}, prompt)
        maker = ItemMaker(prompts, {"sampling": {}}, prompt, whole=True)
        ends = [None] * (len(ids) - 1) + ["length"]
        return merge(
            [
                item_of(answer.add((token,), end), maker, reader)  # type: ignore[arg-type]
                for token, end in zip(ids, ends, strict=True)
            ]
        )

    shown, hidden = told({}), told({"hide_reasoning": True})
    assert shown["reasoning"] == "Hm \N{TEAPOT}."
    assert "reasoning" not in hidden
    for item in (shown, hidden):
        assert item["text"] == "Yes \N{TEAPOT}."
        assert item["reasoning_tokens"] == item["lead_tokens"] == len(thought)


@pytest.mark.parametrize(("effort", "handed"), [("low", "low"), ("of another kind", None), (3, None)])
def test_an_effort_comes_to_the_template_and_to_who_has_none(
    asker: Asker, chat: Any, effort: Any, handed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss, whose conversations vLLM renders without a template."""
    renderer, seen = chat._chat._renderer, []

    async def render(request: Any) -> Any:
        seen.append((request.reasoning_effort, request.chat_template_kwargs))
        return [], [{"prompt_token_ids": [5]}]

    monkeypatch.setattr(renderer, "render_chat", render)
    arguments = {"reasoning_effort": effort}
    request = {"messages": [{"role": "user", "content": "hi"}], "template": {"arguments": arguments}}
    asker.run(chat.encode(request))
    assert seen == [(handed, arguments)]
    chat.read({"reading": {"arguments": arguments}, "sampling": {}}, [5])
    if handed is None:
        monkeypatch.setattr(renderer, "use_harmony", True)
        with pytest.raises(PromptError, match="reasoning_effort"):
            asker.run(chat.encode(request))


def test_a_structure_that_would_leave_no_room_for_channels_is_refused(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat._chat._renderer, "use_harmony", True)
    chat.read({"reading": {}, "sampling": {}}, [5])
    with pytest.raises(UnsupportedError, match="channels"):
        chat.read({"reading": {}, "sampling": {"json_schema": "{}"}}, [5])


def test_a_parser_that_cannot_read_what_is_asked_for_says_so(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.exceptions import VLLMValidationError

    def adjust(self: Any, request: Any) -> Any:
        raise VLLMValidationError("no such calls")

    monkeypatch.setattr(chat._chat._parser_class, "adjust_request", adjust)
    with pytest.raises(UnsupportedError, match="no such calls"):
        chat.read({"reading": ASKED, "sampling": {}}, [5])


def test_a_parser_that_vllm_does_not_know_is_refused(asker: Asker, prompts: Prompts) -> None:
    with pytest.raises(UnsupportedError, match="no_such"):
        chat_of(asker.engine, prompts, app(tools="no_such"))
    without = chat_of(asker.engine, prompts, app(tools="none"))
    with pytest.raises(UnsupportedError, match="set `tools`"):
        without.read({"reading": ASKED, "sampling": {}}, [5])


def answer(asker: Asker, prompts: Prompts, chat: Chat, prompt: str, asked: Any, **sampling: Any) -> Item:
    ids = prompts.encode({"prompt": prompt})
    reader, said = chat.read({"reading": asked, "sampling": {"max_tokens": 60, **sampling}}, ids)

    async def ask() -> Item:
        deltas = asker.engine.generate(f"r{id(reader)}", ids, SamplingParams(**said))
        return merge(
            [
                item
                async for item in items(deltas, ItemMaker(prompts, {"sampling": {}}, ids, whole=True), reader)
            ]
        )

    return asker.run(ask())


@pytest.mark.parametrize("mode", ["named", "required"])
def test_forced_calls_are_whole_calls(asker: Asker, prompts: Prompts, chat: Chat, mode: str) -> None:
    named = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    call = {"type": "object", "properties": {"name": {"const": "get_weather"}, "parameters": named}}
    call |= {"required": ["name", "parameters"], "additionalProperties": False}
    listed = {"type": "array", "minItems": 1, "maxItems": 1, "items": call}
    schema = json.dumps(named if mode == "named" else listed)
    asked = {**ASKED, "mode": mode, "name": "get_weather"}
    found = answer(asker, prompts, chat, "x</think>", asked, json_schema=schema)
    assert found["finish_reason"] == "tool_calls"
    assert found["calls"][0][2] == "get_weather"
    assert json.loads("".join(piece for *_, piece in found["calls"]))["n"] in (1, 2)


def test_a_structure_holds_behind_the_reasoning(asker: Asker, prompts: Prompts, chat: Chat) -> None:
    end = prompts.token_of("</think>")
    assert end is not None
    found = answer(
        asker, prompts, chat, "x<think>", {}, json_schema=json.dumps(SCHEMA), logit_bias=((end, 100.0),)
    )
    assert json.loads(found["text"]) == {"a": 1}
    assert found["finish_reason"] == "stop"
