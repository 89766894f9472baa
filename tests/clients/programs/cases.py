"""Runs a client's cases in turn and prints one line of JSON for each: what came, or what went wrong."""

import json
import os
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

WORDS = SimpleNamespace(**json.loads(os.environ["CLIENT_WORDS"]))
"""What to ask: model, greeting, weather, two_cities, aloud, describe; and the weather tool's result."""

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
DESCRIPTION_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "sky": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "sky", "degrees"],
    "additionalProperties": False,
}


class Weather:
    """The tool, which notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def get_weather(self, city: str) -> str:
        """The weather in a city.

        Args:
            city: The city's name.
        """
        self.calls.append(["get_weather", {"city": city}])
        return str(WORDS.result)


def run(cases: dict[str, Callable[[], Any]]) -> None:
    for name, case in cases.items():
        began = time.monotonic()
        line: dict[str, Any] = {"case": name}
        try:
            line["came"] = case()
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            line["error"] = traceback.format_exc()
        line["seconds"] = round(time.monotonic() - began, 2)
        # A client may have written half a line.
        print("\nCASE " + json.dumps(line), flush=True)
