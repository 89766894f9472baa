"""Libraries that speak OpenAI's interface do against Shoal what they do against OpenAI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import lesson
from tests.clients.catalogue import CLIENTS
from tests.clients.served import Ran, command_of, run_program

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

IN_PARIS = ["get_weather", {"city": "Paris"}]
TWO_TURNS = {"calls": [IN_PARIS], "answer": lesson.TOLD}
EXPECTED: dict[str, Any] = {
    "chat": lesson.GREETED,
    "stream": lesson.GREETED,
    "stream_helper": lesson.GREETED,
    "asynchronous": lesson.GREETED,
    "history": lesson.GREETED,
    "structured": lesson.DESCRIPTION,
    "structured_json": lesson.DESCRIPTION,
    "streamed_structured": lesson.DESCRIPTION,
    "stream_object": lesson.DESCRIPTION,
    "tools": TWO_TURNS,
    "streamed_tools": TWO_TURNS,
    "agent": TWO_TURNS,
    "named_tool": [IN_PARIS],
    "required_tool": [IN_PARIS],
    "parallel_tools": [IN_PARIS, ["get_weather", {"city": "北京"}]],
    "text_before_tools": {"text": lesson.THOUGHT, "calls": [IN_PARIS]},
}
"""What each case brings, whatever the client."""


@pytest.fixture(scope="module")
def ran(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a client's program when it is first asked for; all its cases are in one run."""
    known: dict[str, Ran] = {}

    def of(name: str) -> Ran:
        if name not in known:
            client, folder = CLIENTS[name], tmp_path_factory.mktemp(name)
            known[name] = run_program(command_of(client, folder), base_url, folder, **client.variables)
        return known[name]

    return of


@pytest.mark.parametrize(
    ("client", "case"), [(name, case) for name, client in CLIENTS.items() for case in client.cases]
)
def test_client(client: str, case: str, ran: Any) -> None:
    assert ran(client).came(case) == EXPECTED[case]
