"""OpenAI's own client over the Responses API: texts, events, a structured answer, a tool, items sent back."""

import json
from typing import Any

import openai
from cases import WEATHER_TOOL, WORDS, Weather, run
from pydantic import BaseModel

client = openai.OpenAI(max_retries=0)
asked: dict[str, Any] = {"model": WORDS.model, "temperature": 0, "store": False}
tool = {"type": "function", **WEATHER_TOOL["function"], "strict": True}


class Description(BaseModel):
    city: str
    sky: str
    degrees: int


def chat() -> Any:
    return client.responses.create(input=WORDS.greeting, **asked).output_text


def stream() -> Any:
    with client.responses.stream(input=WORDS.greeting, **asked) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert final.output_text == text
    assert final.usage is not None
    return text


def structured() -> Any:
    answer = client.responses.parse(input=WORDS.describe, text_format=Description, **asked)
    assert answer.output_parsed is not None
    return answer.output_parsed.model_dump()


def _two_turns(ask: Any) -> Any:
    weather = Weather()
    items: list[Any] = [{"role": "user", "content": WORDS.weather}]
    first = ask(items)
    items += [item.model_dump() for item in first.output]
    for call in first.output:
        if call.type == "function_call":
            result = weather.get_weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return {"calls": weather.calls, "answer": ask(items).output_text}


def tools() -> Any:
    return _two_turns(lambda items: client.responses.create(input=items, tools=[tool], **asked))


def streamed_tools() -> Any:
    def ask(items: Any) -> Any:
        with client.responses.stream(input=items, tools=[tool], **asked) as events:
            return events.get_final_response()

    return _two_turns(ask)


def named_tool() -> Any:
    answer = client.responses.create(
        input=WORDS.weather, tools=[tool], tool_choice={"type": "function", "name": "get_weather"}, **asked
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    return [[call.name, json.loads(call.arguments)] for call in calls]


def history() -> Any:
    items: list[Any] = []
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        items.append({"role": "user", "content": words})
        answer = client.responses.create(input=items, **asked)
        items += [item.model_dump() for item in answer.output]
    return answer.output_text


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
