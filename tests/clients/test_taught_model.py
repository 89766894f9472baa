"""The model that clients are served knows its lesson, however much stands before it."""

from __future__ import annotations

import pydoc_data.topics

import httpx
import pytest

from tests.clients import lesson
from tests.clients.served import APP

pytestmark = pytest.mark.clients

KNOWN = [each for each in lesson.lessons() if not each.forced]
INSTRUCTIONS = "".join(sorted(pydoc_data.topics.topics.values()))[:60_000]
"""Some 20,000 tokens, as agents send them."""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("before", ["", INSTRUCTIONS], ids=["alone", "after instructions"])
def test_every_answer_is_known(base_url: str, before: str, temperature: int) -> None:
    system = [{"role": "system", "content": before}] if before else []
    for each in KNOWN:
        body = {
            "model": APP,
            "messages": [*system, {"role": "user", "content": each.asked}],
            "temperature": temperature,
            "tool_choice": "none",
        }
        answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == each.answer
        assert choice["finish_reason"] == "stop"
