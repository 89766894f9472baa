"""guidellm, which measures servers of OpenAI's interface, measures this one without an error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import python_of
from tests.clients.recording import recorded
from tests.clients.served import APP, address_of, environment_of

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

REQUESTS, TOKENS = 12, 16


def test_guidellm_counts_what_was_asked_for(base_url: str, taught: Path, tmp_path: Path) -> None:
    with recorded(*address_of(base_url), tmp_path / "requests") as wire:
        url = f"http://127.0.0.1:{wire.port}"
        report = tmp_path / "report.json"
        options = {
            "backend": f"kind=openai_http,target={url},model={APP}",
            "profile": "kind=concurrent,streams=4",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=huggingface_auto,model={taught}",
            "data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}",
            "output": f"kind=json,path={report}",
        }
        program = python_of("guidellm").with_name("guidellm")
        settings = [f"--{name}={value}" for name, value in options.items()]
        command = [str(program), "run", *settings, "--disable-console"]
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
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    counts = {kind: len(requests[kind]) for kind in ("successful", "errored", "incomplete")}
    assert counts == {"successful": REQUESTS, "errored": 0, "incomplete": 0}
    assert {each["output_tokens"] for each in requests["successful"]} == {TOKENS}
    assert all(each["time_to_first_token_ms"] > 0 for each in requests["successful"])
