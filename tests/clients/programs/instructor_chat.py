"""Instructor: structured answers, by a schema and by a tool that must be called."""

from typing import Any

import instructor
import openai
from cases import WORDS, run
from pydantic import BaseModel

plain = openai.OpenAI(max_retries=0)


class Description(BaseModel):
    city: str
    sky: str
    degrees: int


class get_weather(BaseModel):  # noqa: N801 - the class's name is the tool's
    """The weather in a city."""

    city: str


def _asked(mode: instructor.Mode, kind: Any, words: str) -> Any:
    client = instructor.from_openai(plain, mode=mode)
    return client.create(
        model=WORDS.model,
        messages=[{"role": "user", "content": words}],
        response_model=kind,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


def structured() -> Any:
    return _asked(instructor.Mode.JSON_SCHEMA, Description, WORDS.describe).model_dump()


def structured_json() -> Any:
    """The schema stands in the system message, and any object is asked for."""
    return _asked(instructor.Mode.JSON, Description, WORDS.describe).model_dump()


def stream_object() -> Any:
    """The object as far as it is known, again and again."""
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.create_partial(
        model=WORDS.model,
        messages=[{"role": "user", "content": WORDS.describe}],
        response_model=Description,
        temperature=0,
    )
    return last.model_dump()


def named_tool() -> Any:
    return [["get_weather", _asked(instructor.Mode.TOOLS, get_weather, WORDS.weather).model_dump()]]


run(
    {
        "structured": structured,
        "structured_json": structured_json,
        "stream_object": stream_object,
        "named_tool": named_tool,
    }
)
