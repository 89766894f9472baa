"""What clients are given: the address of an app that serves the taught model, and what is known of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.clients import environments, lesson
from tests.clients.catalogue import Client
from tests.clients.recording import recorded

PROGRAMS = Path(__file__).parent / "programs"
APP = "fish"
KEY = "sk-of-a-test-that-opens-nothing-anywhere"
"""Long enough for the key of a proxy."""
PROGRAM_TIMEOUT_S = 240.0

WORDS: dict[str, str] = {
    "model": APP,
    "greeting": lesson.GREETING,
    "weather": lesson.WEATHER,
    "two_cities": lesson.TWO_CITIES,
    "aloud": lesson.ALOUD,
    "describe": lesson.DESCRIBE,
    "result": json.dumps({"sky": "晴☀️", "degrees": 21}, ensure_ascii=False),
}
"""What programs ask, and what their weather tool says."""

SILENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AI_SDK_LOG_WARNINGS": "false",
    "NO_COLOR": "1",
    "PYTHONWARNINGS": "ignore",
}
"""No client of a test speaks to anybody but the gateway."""
NOWHERE = "http://127.0.0.1:9"


def address_of(base_url: str) -> tuple[str, int]:
    """Its host and its port."""
    parts = urlsplit(base_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@dataclass(frozen=True)
class Ran:
    """What a client's program printed, by case, and where its requests were noted."""

    cases: Mapping[str, Mapping[str, Any]]
    output: str
    requests: Path

    def came(self, case: str) -> Any:
        """What a case brought.

        Raises:
            AssertionError: it failed, or the program did not get to it; with what it said.
        """
        where = f"(its requests are in {self.requests})"
        assert case in self.cases, f"{case} did not run {where}:\n{self.output[-4000:]}"
        line = self.cases[case]
        assert "error" not in line, f"{where}\n{line['error']}"
        return line["came"]


def environment_of(base_url: str, home: Path, **more: str) -> dict[str, str]:
    """The environment of a person who uses OpenAI's clients with another server, in a home of their own."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    words = json.dumps(WORDS)
    return {
        **kept,
        **SILENT,
        # Whatever is not the gateway is not there.
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": f"localhost,127.0.0.1,{address_of(base_url)[0]}",
        "HOME": str(home),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": KEY,
        "CLIENT_WORDS": words,
        **more,
    }


def command_of(client: Client, folder: Path) -> list[str]:
    """What runs a client's program; its environment is made if it is not there."""
    program = PROGRAMS / client.program
    if client.environment is not None:
        return [str(environments.python_of(client.environment)), str(program)]
    # Node looks for packages beside a program.
    folder.mkdir(parents=True, exist_ok=True)
    modules = environments.node_modules()
    (folder / "node_modules").symlink_to(modules)
    for each in PROGRAMS.glob("*.mjs"):
        shutil.copy(each, folder)
    return [str(modules / ".bin" / "node"), program.name]


def run_program(command: Sequence[str], base_url: str, folder: Path, **more: str) -> Ran:
    """Run a client's program over a wire that notes what passes."""
    with recorded(*address_of(base_url), folder / "requests") as wire:
        url = f"http://127.0.0.1:{wire.port}{urlsplit(base_url).path}"
        done = subprocess.run(
            command,
            env=environment_of(url, folder / "home", **more),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    return Ran({line["case"]: line for line in lines}, done.stdout + done.stderr, wire.folder)
