"""Anthropic's own client over the Messages API: texts, a stream, a schema, a tool, messages handed back."""

import json
import os
from typing import Any

import anthropic
from cases import DESCRIPTION_SCHEMA, WEATHER_TOOL, WORDS, Weather, run

client = anthropic.Anthropic(
    base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"),
    api_key=os.environ["OPENAI_API_KEY"],
    max_retries=0,
)
asked: dict[str, Any] = {"model": WORDS.model, "max_tokens": 500}
tool: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": WEATHER_TOOL["function"]["parameters"],
}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def chat() -> Any:
    return text_of(client.messages.create(messages=[user(WORDS.greeting)], **asked))


def stream() -> Any:
    with client.messages.stream(messages=[user(WORDS.greeting)], **asked) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text_of(final) == text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    return text


def structured() -> Any:
    form = {"format": {"type": "json_schema", "schema": DESCRIPTION_SCHEMA}}
    answer = client.messages.create(
        messages=[user(WORDS.describe)], extra_body={"output_config": form}, **asked
    )
    return json.loads(text_of(answer))


def _two_turns(ask: Any) -> Any:
    weather = Weather()
    messages = [user(WORDS.weather)]
    first = ask(messages)
    assert first.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather.get_weather(**block.input)}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages.append(user(results))
    return {"calls": weather.calls, "answer": text_of(ask(messages))}


def tools() -> Any:
    return _two_turns(lambda messages: client.messages.create(messages=messages, tools=[tool], **asked))


def streamed_tools() -> Any:
    def ask(messages: Any) -> Any:
        with client.messages.stream(messages=messages, tools=[tool], **asked) as events:
            return events.get_final_message()

    return _two_turns(ask)


def named_tool() -> Any:
    choice: Any = {"type": "tool", "name": "get_weather"}
    answer = client.messages.create(messages=[user(WORDS.weather)], tools=[tool], tool_choice=choice, **asked)
    return [[block.name, block.input] for block in answer.content if block.type == "tool_use"]


def history() -> Any:
    messages: list[Any] = []
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        messages.append(user(words))
        answer = client.messages.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
    return text_of(answer)


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "history": history,
        "tools": tools,
        "streamed_tools": streamed_tools,
        "named_tool": named_tool,
    }
)
