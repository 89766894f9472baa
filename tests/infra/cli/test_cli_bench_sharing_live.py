"""`shoal bench sharing` without --simulate: what it shows of a measurement, and when it has failed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from infra.cli.main import call
from infra.lab.bench import sharing
from infra.lab.bench.clients import FailedRequest
from tests.infra.lab.bench.logs import at
from tests.infra.lab.bench.test_sharing_report import SIDE

BROKEN = replace(SIDE, failures=[FailedRequest(at(11), at(12), "503: no room")])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that were asked for; one request fails on the fixed split when there are seven."""
    seen: list[int] = []

    def measure(rounds: int, say: object) -> object:
        seen.append(rounds)
        return SIDE, BROKEN if rounds == 7 else SIDE

    monkeypatch.setattr(sharing, "measure", measure)
    return seen


def test_both_sides_are_shown_beside_each_other(asked: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "sharing"]) == 0
    shown = capsys.readouterr().out
    assert asked == [10]
    assert shown.index("want → first token") < shown.index("sharing") < shown.index("fixed split")
    for words in ("2 rounds", "device-seconds in all", "10.0 with 1 worker", "first token, p99"):
        assert words in shown


def test_a_failed_request_is_exit_code_1_after_the_figures(
    asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["bench", "sharing", "--rounds", "7", "--json"]) == 1
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert (found["ok"], found["sides"]["fixed"]["requests_failed"]) == (False, 1)
    assert output.err == "the fixed split: 1 of 6 requests failed: 503: no room\n"
