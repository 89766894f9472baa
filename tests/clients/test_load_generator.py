"""guidellm, which measures servers of OpenAI's interface, measures this one without an error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import python_of
from tests.clients.recording import recorded
from tests.clients.served import address_of, environment_of

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

REQUESTS = 12


def test_guidellm_counts_what_was_asked_for(base_url: str, taught: Path, tmp_path: Path) -> None:
    with recorded(*address_of(base_url), tmp_path / "requests") as wire:
        url = f"http://127.0.0.1:{wire.port}"
        command = [
            *(str(python_of("guidellm").with_name("guidellm")), "benchmark", "run"),
            *("--target", url, "--profile", "throughput", "--rate", "4"),
            *("--max-requests", str(REQUESTS), "--processor", str(taught)),
            *("--data", "prompt_tokens=64,output_tokens=16"),
            *("--output-path", str(tmp_path), "--outputs", "json", "--disable-console"),
        ]
        done = subprocess.run(
            command,
            env=environment_of(url, tmp_path / "home"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    (path,) = tmp_path.glob("*.json")
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert {kind: len(requests[kind]) for kind in ("successful", "errored")} == {
        "successful": REQUESTS,
        "errored": 0,
    }
    assert {each["output_tokens"] for each in requests["successful"]} == {16}
