"""LangChain's ChatOpenAI: messages, a tool bound to the model, a structured answer."""

import asyncio
from typing import Any

from cases import WORDS, Weather, run
from langchain_core.messages import HumanMessage, messages_from_dict, messages_to_dict
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=WORDS.model, temperature=0, max_retries=0)


class Description(BaseModel):
    """What a city is like."""

    city: str
    sky: str
    degrees: int


def chat() -> Any:
    return model.invoke(WORDS.greeting).content


def stream() -> Any:
    return "".join(chunk.text for chunk in model.stream(WORDS.greeting))


def structured() -> Any:
    answer = model.with_structured_output(Description, method="json_schema").invoke(WORDS.describe)
    return answer.model_dump()


def _two_turns(ask: Any) -> Any:
    weather = Weather()
    tool = StructuredTool.from_function(weather.get_weather, parse_docstring=True)
    able = model.bind_tools([tool])
    messages: list[Any] = [HumanMessage(WORDS.weather)]
    first = ask(able, messages)
    messages.append(first)
    messages += [tool.invoke(call) for call in first.tool_calls]
    return {"calls": weather.calls, "answer": ask(able, messages).text}


def tools() -> Any:
    return _two_turns(lambda able, messages: able.invoke(messages))


def streamed_tools() -> Any:
    def ask(able: Any, messages: Any) -> Any:
        whole = None
        for chunk in able.stream(messages):
            whole = chunk if whole is None else whole + chunk
        return whole

    return _two_turns(ask)


def named_tool() -> Any:
    """The way of with_structured_output that goes by a tool that must be called."""
    weather = Weather()
    tool = StructuredTool.from_function(weather.get_weather, parse_docstring=True)
    able = model.bind_tools([tool], tool_choice="get_weather", strict=True)
    return [[call["name"], call["args"]] for call in able.invoke(WORDS.weather).tool_calls]


def asynchronous() -> Any:
    async def whole() -> str:
        return "".join([chunk.text async for chunk in model.astream(WORDS.greeting)])

    return asyncio.run(whole())


def history() -> Any:
    messages: list[Any] = []
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        messages = messages_from_dict(messages_to_dict([*messages, HumanMessage(words)]))
        messages.append(model.invoke(messages))
    return messages[-1].content


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "history": history,
        "tools": tools,
        "streamed_tools": streamed_tools,
        "named_tool": named_tool,
        "asynchronous": asynchronous,
    }
)
