"""Pydantic AI: agents over the chat endpoint, with a tool, a structured output, and messages kept as JSON."""

import asyncio
from typing import Any

from cases import WORDS, Weather, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelMessagesTypeAdapter, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel(WORDS.model)
settings: Any = {"temperature": 0}


class Description(BaseModel):
    city: str
    sky: str
    degrees: int


def chat() -> Any:
    return Agent(model, model_settings=settings).run_sync(WORDS.greeting).output


def stream() -> Any:
    async def whole() -> str:
        async with Agent(model, model_settings=settings).run_stream(WORDS.greeting) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True, debounce_by=None)])

    return asyncio.run(whole())


def structured() -> Any:
    agent = Agent(model, output_type=NativeOutput(Description), model_settings=settings)
    return agent.run_sync(WORDS.describe).output.model_dump()


def tools() -> Any:
    weather = Weather()
    agent = Agent(model, tools=[weather.get_weather], model_settings=settings)
    answer = agent.run_sync(WORDS.weather).output
    return {"calls": weather.calls, "answer": answer}


def streamed_tools() -> Any:
    weather = Weather()
    agent = Agent(model, tools=[weather.get_weather], model_settings=settings)

    async def whole() -> str:
        async with agent.run_stream(WORDS.weather) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True, debounce_by=None)])

    answer = asyncio.run(whole())
    return {"calls": weather.calls, "answer": answer}


def history() -> Any:
    agent = Agent(model, model_settings=settings)
    kept: Any = None
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        answer = agent.run_sync(words, message_history=kept)
        kept = ModelMessagesTypeAdapter.validate_json(answer.all_messages_json())
    return answer.output


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
