"""The `llm` command: chats, streams, a schema, a tool, and a conversation that goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients import lesson
from tests.clients.environments import python_of
from tests.clients.served import APP, WORDS, environment_of

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

TOOL = f'''
def get_weather(city: str) -> str:
    """The weather in a city."""
    return {WORDS["result"]!r}
'''
Llm = Callable[..., str]


@pytest.fixture
def llm(base_url: str, tmp_path: Path) -> Llm:
    """Runs the command and returns what it printed."""
    program = python_of("llm").with_name("llm")
    row = {"model_id": APP, "model_name": APP, "api_base": base_url, "can_stream": True}
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "extra-openai-models.yaml").write_text(
        json.dumps([{**row, "supports_schema": True, "supports_tools": True}])
    )

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(program), *arguments],
            env=environment_of(base_url, tmp_path / "home", LLM_USER_PATH=str(settings)),
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("way", [(), ("--no-stream",)], ids=["stream", "whole"])
def test_it_chats(llm: Llm, way: tuple[str, ...]) -> None:
    assert llm("prompt", "-m", APP, *way, lesson.GREETING) == lesson.GREETED


def test_it_answers_by_a_schema(llm: Llm) -> None:
    answer = llm("prompt", "-m", APP, "--schema", "city, sky, degrees int", lesson.DESCRIBE)
    assert json.loads(answer) == lesson.DESCRIPTION


def test_it_goes_on_with_a_conversation(llm: Llm) -> None:
    llm("prompt", "-m", APP, lesson.DESCRIBE)
    assert llm("prompt", "--continue", lesson.GREETING) == lesson.GREETED


@pytest.mark.parametrize("way", [(), ("--no-stream",)], ids=["stream", "whole"])
def test_it_calls_a_tool_and_says_what_came(llm: Llm, way: tuple[str, ...]) -> None:
    answer = llm("prompt", "-m", APP, *way, "--functions", TOOL, lesson.WEATHER)
    assert answer == lesson.TOLD
