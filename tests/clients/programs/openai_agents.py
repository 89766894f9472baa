"""OpenAI's Agents SDK over either endpoint: runs, streamed runs, a function tool, an output type."""

import asyncio
import os
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from cases import WORDS, Weather, run
from pydantic import BaseModel

set_default_openai_api(os.environ["AGENTS_API"])
set_tracing_disabled(True)
loop = asyncio.Runner()
"""One for all cases: the SDK keeps its connections."""


class Description(BaseModel):
    city: str
    sky: str
    degrees: int


def agent(**more: Any) -> Any:
    return Agent(name="fish", model=WORDS.model, model_settings=ModelSettings(temperature=0), **more)


def _streamed(worker: Any, words: str) -> str:
    async def pieces_of() -> str:
        pieces = []
        answer = Runner.run_streamed(worker, words)
        async for event in answer.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                pieces.append(event.data.delta)
        assert "".join(pieces) == answer.final_output
        return "".join(pieces)

    return loop.run(pieces_of())


def whole(worker: Any, words: Any) -> Any:
    return loop.run(Runner.run(worker, words))


def chat() -> Any:
    return whole(agent(), WORDS.greeting).final_output


def stream() -> Any:
    return _streamed(agent(), WORDS.greeting)


def structured() -> Any:
    return whole(agent(output_type=Description), WORDS.describe).final_output.model_dump()


def tools() -> Any:
    weather = Weather()
    worker = agent(tools=[function_tool(weather.get_weather)])
    answer = whole(worker, WORDS.weather).final_output
    return {"calls": weather.calls, "answer": answer}


def streamed_tools() -> Any:
    weather = Weather()
    answer = _streamed(agent(tools=[function_tool(weather.get_weather)]), WORDS.weather)
    return {"calls": weather.calls, "answer": answer}


def history() -> Any:
    kept: Any = []
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        answer = whole(agent(), [*kept, {"role": "user", "content": words}])
        kept = answer.to_input_list()
    return answer.final_output


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "history": history,
        "tools": tools,
        "streamed_tools": streamed_tools,
    }
)
