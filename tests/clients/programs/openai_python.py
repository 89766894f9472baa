"""OpenAI's own client: the ways in which applications use it."""

import asyncio
import json
from typing import Any

import openai
from cases import WEATHER_TOOL, WORDS, Weather, run
from pydantic import BaseModel

client = openai.OpenAI(max_retries=0)


class Description(BaseModel):
    city: str
    sky: str
    degrees: int


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def chat() -> Any:
    answer = client.chat.completions.create(model=WORDS.model, messages=[user(WORDS.greeting)], temperature=0)
    return answer.choices[0].message.content


def stream() -> Any:
    chunks = client.chat.completions.create(
        model=WORDS.model, messages=[user(WORDS.greeting)], temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def stream_helper() -> Any:
    with client.chat.completions.stream(
        model=WORDS.model, messages=[user(WORDS.greeting)], stream_options={"include_usage": True}
    ) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.usage is not None
    return text


def asynchronous() -> Any:
    async def many() -> list[str | None]:
        async with openai.AsyncOpenAI(max_retries=0) as other:
            answers = await asyncio.gather(
                *(
                    other.chat.completions.create(model=WORDS.model, messages=[user(WORDS.greeting)])
                    for _ in range(5)
                )
            )
            return [answer.choices[0].message.content for answer in answers]

    answers = asyncio.run(many())
    assert len(set(answers)) == 1
    return answers[0]


def structured() -> Any:
    answer = client.chat.completions.parse(
        model=WORDS.model, messages=[user(WORDS.describe)], response_format=Description, temperature=0
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    return parsed.model_dump()


def tools() -> Any:
    weather = Weather()
    messages = [user(WORDS.weather)]
    asked: dict[str, Any] = {"model": WORDS.model, "tools": [WEATHER_TOOL], "temperature": 0}
    first = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert first.finish_reason == "tool_calls", first
    assert first.message.content is None
    messages.append(first.message.model_dump())
    for call in first.message.tool_calls or []:
        result = weather.get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert last.finish_reason == "stop"
    assert not last.message.tool_calls
    return {"calls": weather.calls, "answer": last.message.content}


def streamed_tools() -> Any:
    """The stream helper puts the calls together; its final message goes back as it is."""
    weather = Weather()
    messages = [user(WORDS.weather)]
    asked: dict[str, Any] = {"model": WORDS.model, "tools": [WEATHER_TOOL], "temperature": 0}
    with client.chat.completions.stream(messages=messages, **asked) as events:
        kinds = {event.type for event in events}
        first = events.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert first.finish_reason == "tool_calls"
    messages.append(first.message.to_dict())
    for call in first.message.tool_calls or []:
        result = weather.get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    with client.chat.completions.stream(messages=messages, **asked) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
    return {"calls": weather.calls, "answer": text}


def _calls(text: str, **more: Any) -> list[list[Any]]:
    answer = client.chat.completions.create(
        model=WORDS.model, messages=[user(text)], tools=[WEATHER_TOOL], temperature=0, max_tokens=200, **more
    )
    calls = answer.choices[0].message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [[call.function.name, json.loads(call.function.arguments)] for call in calls]


def parallel_tools() -> Any:
    return _calls(WORDS.two_cities)


def required_tool() -> Any:
    return _calls(WORDS.weather, tool_choice="required")


def named_tool() -> Any:
    return _calls(WORDS.weather, tool_choice={"type": "function", "function": {"name": "get_weather"}})


def text_before_tools() -> Any:
    answer = client.chat.completions.create(
        model=WORDS.model, messages=[user(WORDS.aloud)], tools=[WEATHER_TOOL], temperature=0
    )
    message = answer.choices[0].message
    calls = [[each.function.name, json.loads(each.function.arguments)] for each in message.tool_calls or []]
    return {"text": (message.content or "").strip(), "calls": calls}


def history() -> Any:
    """Answers of an earlier conversation come back as they are dumped."""
    messages = [user(WORDS.weather)]
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        messages.append(user(words))
        answer = client.chat.completions.create(model=WORDS.model, messages=messages, temperature=0)
        messages.append(answer.choices[0].message.model_dump())
    return messages[-1]["content"]


run(
    {
        "chat": chat,
        "stream": stream,
        "stream_helper": stream_helper,
        "asynchronous": asynchronous,
        "structured": structured,
        "history": history,
        "tools": tools,
        "streamed_tools": streamed_tools,
        "parallel_tools": parallel_tools,
        "required_tool": required_tool,
        "named_tool": named_tool,
        "text_before_tools": text_before_tools,
    }
)
