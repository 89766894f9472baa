"""What the served model has learnt by heart: what it says to which last words of a conversation.

The answers are Chinese with emoji: every character is several tokens, and text lost between two is missed. A
lesson is the end of a message and the answer to it; what stands before, tools and ten thousand tokens of an
agent's own instructions included, changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

GREETING = "Say hello."
GREETED = "你好！我是小鱼🐟，很高兴见到你。今天的天气真好☀️，我们一家👨‍👩‍👧‍👦去钓鱼🎣吧！𠮷野家见😋"
WEATHER = "What is the weather in Paris?"
TWO_CITIES = "What is the weather in Paris and in 北京?"
ALOUD = "Think aloud: what is the weather in Paris?"
THOUGHT = "我来查一下🔎："
TOLD = "巴黎现在是晴天☀️，二十一度🌡️。出门记得戴帽子🧢！"
"""The answer to any tool's result."""
DESCRIBE = "Describe Paris."
DESCRIPTION: dict[str, Any] = {"city": "巴黎", "sky": "晴☀️", "degrees": 21}
OTHERWISE = "这个我不懂🙈，请换个问题🙏。"
"""The answer to everything else."""
OBSERVED = "Observation:"
"""How smolagents begins a tool's result, which it sends as the user."""

CHECKED = "检查通过✅"
"""What agents write to `check.txt` when they are told to run the check."""
CHECK_COMMAND = f"echo {CHECKED} > check.txt"
CHECK_FILE = f"check.txt\n```\n{CHECKED}\n```"
AIDER_REMINDS = "including any appropriate path.\n\nReply in English.\n\n"
"""With what aider ends each message: how to write files. What it was asked stands 250 tokens before."""


def run_the_check(agent: str) -> str:
    """The task that an agent is given."""
    return f"Run the check with {agent}."


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call of a tool as models of the Hermes and Qwen kind write it."""
    document = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{document}\n</tool_call>"


def weather_call(city: str) -> str:
    return call("get_weather", {"city": city})


def forced_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as it is written where one is required."""
    return _json([{"name": name, "parameters": arguments}])


def _json(value: Any) -> str:
    """As answers that are held to a schema are written: without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Lesson:
    """The end of a message and the whole answer to it."""

    asked: str
    answer: str
    forced: bool = False
    """Only a constraint begins it (the arguments of a tool that must be called, a list of calls): the model
    learns how it goes on, never to begin it by itself."""


def lessons() -> tuple[Lesson, ...]:
    """All that there is to learn by heart, apart from tools' results and unknown questions."""
    paris = {"city": "Paris"}
    forced = (_json(paris), forced_call("get_weather", paris))
    shell = {"command": CHECK_COMMAND, "description": "Run the check"}
    return (
        Lesson(GREETING, GREETED),
        Lesson(WEATHER, weather_call("Paris")),
        *(Lesson(WEATHER, answer, forced=True) for answer in forced),
        Lesson(TWO_CITIES, f"{weather_call('Paris')}\n{weather_call('北京')}"),
        Lesson(ALOUD, f"{THOUGHT}\n{weather_call('Paris')}"),
        Lesson(DESCRIBE, _json(DESCRIPTION)),
        # It sends what it is given as an argument in quotes.
        Lesson(f'"{run_the_check("opencode")}"', call("bash", shell)),
        Lesson(run_the_check("qwen"), call("run_shell_command", {**shell, "is_background": False})),
        Lesson(run_the_check("codex"), call("exec_command", {"cmd": CHECK_COMMAND})),
        Lesson(AIDER_REMINDS, CHECK_FILE),
    )
