"""smolagents: its model alone, and an agent whose answer is a tool's call too."""

import os
from typing import Any

from cases import DESCRIPTION_SCHEMA, WORDS, Weather, run
from smolagents import ChatMessage, OpenAIModel, Tool, ToolCallingAgent
from smolagents.monitoring import LogLevel

model = OpenAIModel(
    model_id=WORDS.model,
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    client_kwargs={"max_retries": 0},
    temperature=0,
)


def user(text: str) -> Any:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


class WeatherTool(Tool):
    name = "get_weather"
    description = "The weather in a city."
    inputs = {"city": {"type": "string", "description": "The city's name."}}  # noqa: RUF012 - as its users write it
    output_type = "string"

    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self.weather = weather

    def forward(self, city: str) -> str:
        return self.weather.get_weather(city)


def chat() -> Any:
    return model.generate([user(WORDS.greeting)]).content


def stream() -> Any:
    return "".join(delta.content or "" for delta in model.generate_stream([user(WORDS.greeting)]))


def structured() -> Any:
    import json

    asked = {"type": "json_schema", "json_schema": {"name": "description", "schema": DESCRIPTION_SCHEMA}}
    return json.loads(model.generate([user(WORDS.describe)], response_format=asked).content)


def tools() -> Any:
    weather = Weather()
    agent = ToolCallingAgent(
        tools=[WeatherTool(weather)], model=model, max_steps=3, verbosity_level=LogLevel.OFF
    )
    answer = agent.run(WORDS.weather)
    return {"calls": weather.calls, "answer": answer}


def streamed_tools() -> Any:
    weather = Weather()
    agent = ToolCallingAgent(
        tools=[WeatherTool(weather)],
        model=model,
        max_steps=3,
        verbosity_level=LogLevel.OFF,
        stream_outputs=True,
    )
    answer = agent.run(WORDS.weather)
    return {"calls": weather.calls, "answer": answer}


def history() -> Any:
    messages: list[Any] = []
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        messages.append(user(words))
        answer = model.generate(messages)
        messages.append(ChatMessage.from_dict(answer.dict()))
    return messages[-1].content


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
