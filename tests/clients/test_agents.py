"""Coding agents do a task with the served model: it calls their own tool, they write the file, it says so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients import lesson
from tests.clients.environments import node_modules, python_of
from tests.clients.recording import recorded
from tests.clients.served import APP, KEY, address_of, environment_of

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

AGENT_TIMEOUT_S = 300.0
CONTEXT_LENGTH = 60_000


@dataclass(frozen=True)
class Task:
    """What an agent is told: where the model is, where to work, what to do."""

    base_url: str
    folder: Path
    words: str


def opencode(task: Task) -> list[str]:
    model = {"name": APP, "tool_call": True, "limit": {"context": CONTEXT_LENGTH, "output": 1000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": task.base_url, "apiKey": KEY},
        "models": {APP: model},
    }
    config = {
        "provider": {"shoal": provider},
        "model": f"shoal/{APP}",
        "small_model": f"shoal/{APP}",
        "share": "disabled",
        "autoupdate": False,
        "permission": "allow",
    }
    (task.folder / "opencode.json").write_text(json.dumps(config))
    (program,) = node_modules().glob("opencode-linux-*[!e]/bin/opencode")
    return [str(program), "run", "--model", f"shoal/{APP}", task.words]


def qwen_code(task: Task) -> list[str]:
    bin_folder = node_modules() / ".bin"
    options = ["--auth-type", "openai", "--model", APP, "--openai-base-url", task.base_url]
    return [str(bin_folder / "node"), str(bin_folder / "qwen"), *options, "--yolo", "--prompt", task.words]


def aider(task: Task) -> list[str]:
    options = f"--model openai/{APP} --edit-format whole --yes-always --map-tokens 0 --chat-language English"
    quiet = "--no-git --no-check-update --analytics-disable --no-show-model-warnings --no-pretty"
    program = python_of("aider").with_name("aider")
    return [str(program), *options.split(), *quiet.split(), "--message", task.words]


def codex(task: Task) -> list[str]:
    provider = {
        "name": "shoal",
        "base_url": task.base_url,
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    settings = {f"model_providers.shoal.{name}": value for name, value in provider.items()}
    # Without a sandbox it would offer a search of the web, which the gateway refuses.
    settings |= {"model": APP, "model_provider": "shoal", "web_search": "disabled"}
    options = [f"--config={name}={json.dumps(value)}" for name, value in settings.items()]
    bin_folder = node_modules() / ".bin"
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(bin_folder / "node"), str(bin_folder / "codex"), "exec", *free, *options, task.words]


AGENTS: dict[str, Callable[[Task], list[str]]] = {
    "opencode": opencode,
    "qwen": qwen_code,
    "aider": aider,
    "codex": codex,
}


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_does_its_task(agent: str, base_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    with recorded(*address_of(base_url), tmp_path / "requests") as wire:
        url = f"http://127.0.0.1:{wire.port}{urlsplit(base_url).path}"
        command = AGENTS[agent](Task(url, folder, lesson.run_the_check(agent)))
        done = subprocess.run(
            command,
            env=environment_of(
                url, tmp_path / "home", OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_LSP_DOWNLOAD="1"
            ),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=AGENT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n(its requests are in {wire.folder})"
    assert done.returncode == 0, said
    check = folder / "check.txt"
    assert check.exists(), said
    assert check.read_text().strip() == lesson.CHECKED
    if agent != "aider":  # its edit is its last word
        assert lesson.TOLD in done.stdout, said
