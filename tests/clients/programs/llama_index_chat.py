"""LlamaIndex's OpenAILike: chat, stream, a structured answer, and an agent that calls a function."""

import asyncio
from typing import Any

from cases import WORDS, Weather, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model=WORDS.model,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=16000,
    temperature=0,
    max_retries=0,
)


class Description(BaseModel):
    """What a city is like."""

    city: str
    sky: str
    degrees: int


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def chat() -> Any:
    return model.chat([user(WORDS.greeting)]).message.content


def stream() -> Any:
    return "".join(chunk.delta or "" for chunk in model.stream_chat([user(WORDS.greeting)]))


def structured() -> Any:
    return model.as_structured_llm(Description).chat([user(WORDS.describe)]).raw.model_dump()


def tools() -> Any:
    weather = Weather()
    tool = FunctionTool.from_defaults(weather.get_weather)
    messages = [user(WORDS.weather)]
    first = model.chat_with_tools([tool], chat_history=messages)
    messages.append(first.message)
    for call in model.get_tool_calls_from_response(first):
        result = tool(**call.tool_kwargs)
        messages.append(
            ChatMessage(role="tool", content=str(result), additional_kwargs={"tool_call_id": call.tool_id})
        )
    return {
        "calls": weather.calls,
        "answer": model.chat_with_tools([tool], chat_history=messages).message.content,
    }


def agent() -> Any:
    """The agent streams by itself."""
    weather = Weather()

    async def whole() -> str:
        worker = FunctionAgent(tools=[FunctionTool.from_defaults(weather.get_weather)], llm=model)
        return str(await worker.run(WORDS.weather))

    answer = asyncio.run(whole())
    return {"calls": weather.calls, "answer": answer}


def history() -> Any:
    messages: list[ChatMessage] = []
    for words in (WORDS.greeting, WORDS.describe, WORDS.greeting):
        messages.append(user(words))
        messages.append(ChatMessage(**model.chat(messages).message.model_dump()))
    return messages[-1].content


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "history": history,
        "tools": tools,
        "agent": agent,
    }
)
