"""LiteLLM's completion() over an OpenAI-compatible server, and the same through its proxy."""

import asyncio
import json
import os
from typing import Any

import litellm
from cases import DESCRIPTION_SCHEMA, WEATHER_TOOL, WORDS, Weather, run

litellm.telemetry = False
asked: dict[str, Any] = {
    "model": f"openai/{WORDS.model}",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "temperature": 0,
    "num_retries": 0,
}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def chat() -> Any:
    return litellm.completion(messages=[user(WORDS.greeting)], **asked).choices[0].message.content


def stream() -> Any:
    chunks = litellm.completion(
        messages=[user(WORDS.greeting)], stream=True, stream_options={"include_usage": True}, **asked
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def asynchronous() -> Any:
    async def whole() -> str:
        chunks = await litellm.acompletion(messages=[user(WORDS.greeting)], stream=True, **asked)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    return asyncio.run(whole())


def structured() -> Any:
    kind = {"type": "json_schema", "json_schema": {"name": "d", "schema": DESCRIPTION_SCHEMA, "strict": True}}
    answer = litellm.completion(messages=[user(WORDS.describe)], response_format=kind, **asked)
    return json.loads(answer.choices[0].message.content)


def _two_turns(ask: Any) -> Any:
    weather = Weather()
    messages: list[Any] = [user(WORDS.weather)]
    first = ask(messages)
    assert first.finish_reason == "tool_calls"
    messages.append(first.message.model_dump())
    for call in first.message.tool_calls:
        result = weather.get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"calls": weather.calls, "answer": ask(messages).message.content}


def tools() -> Any:
    return _two_turns(
        lambda messages: litellm.completion(messages=messages, tools=[WEATHER_TOOL], **asked).choices[0]
    )


def streamed_tools() -> Any:
    def ask(messages: Any) -> Any:
        chunks = litellm.completion(messages=messages, tools=[WEATHER_TOOL], stream=True, **asked)
        return litellm.stream_chunk_builder(list(chunks), messages=messages).choices[0]

    return _two_turns(ask)


def named_tool() -> Any:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = litellm.completion(
        messages=[user(WORDS.weather)], tools=[WEATHER_TOOL], tool_choice=choice, max_tokens=200, **asked
    )
    calls = answer.choices[0].message.tool_calls
    return [[call.function.name, json.loads(call.function.arguments)] for call in calls]


def history() -> Any:
    messages: list[Any] = []
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        messages.append(user(words))
        answer = litellm.completion(messages=messages, **asked)
        messages.append(answer.choices[0].message.model_dump())
    return messages[-1]["content"]


run(
    {
        "chat": chat,
        "stream": stream,
        "asynchronous": asynchronous,
        "structured": structured,
        "history": history,
        "tools": tools,
        "streamed_tools": streamed_tools,
        "named_tool": named_tool,
    }
)
