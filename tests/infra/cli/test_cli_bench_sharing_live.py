"""`shoal bench sharing` without --simulate: what it shows of a measurement, and when it has failed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from infra.cli.main import call
from infra.lab.bench import sharing
from infra.lab.bench.asking import FailedRequest
from infra.lab.bench.sharing_plan import SharingPlan
from infra.lab.bench.side import FIXED, SHARING
from tests.infra.lab.bench.logs import at
from tests.infra.lab.bench.test_sharing_report import SIDE

BROKEN = replace(SIDE, failures=[FailedRequest(at(11), at(12), "503: no room")])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SharingPlan]:
    """What was asked for; one request fails on the fixed split when there are seven rounds."""
    seen: list[SharingPlan] = []

    def measure(plan: SharingPlan, say: object) -> object:
        seen.append(plan)
        return {SHARING: SIDE, FIXED: BROKEN if plan.rounds == 7 else SIDE}

    monkeypatch.setattr(sharing, "measure", measure)
    return seen


def test_both_sides_are_shown_beside_each_other(
    asked: list[SharingPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["bench", "sharing"]) == 0
    shown = capsys.readouterr().out
    assert asked == [SharingPlan(rounds=10)]
    assert shown.index("want → first token") < shown.index("sharing") < shown.index("fixed split")
    for words in (
        "2 rounds",
        "on 4 devices,",
        "device-seconds in all",
        "10.0 with 1 worker",
        "first token, p99",
    ):
        assert words in shown


def test_a_failed_request_is_exit_code_1_after_the_figures(
    asked: list[SharingPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["bench", "sharing", "--rounds", "7", "--json"]) == 1
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert (found["ok"], found["sides"]["fixed"]["requests_failed"]) == (False, 1)
    assert output.err == "fixed split: 1 of 6 requests failed: 503: no room\n"


def test_a_load_that_is_not_of_steps_has_a_length_and_no_rounds(
    asked: list[SharingPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["bench", "sharing", "--paced", "--shape", "day", "--minutes", "12", "--devices", "8"]) == 0
    assert asked == [SharingPlan(load="day", minutes=12.0, paced=True, devices=8)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "night"], "there is no such load; there are steps, day, bursts"),
        (["--minutes", "3"], "--minutes is of other loads"),
        (["--paced", "--shape", "day", "--rounds", "3"], "--rounds is of the load steps, and not of day"),
        (["--shape", "bursts"], "--shape bursts needs --paced"),
        (["--paced", "--devices", "5"], "--devices 5: without --simulate it is an even number from 4 to 16"),
        (["--paced", "--devices", "H100-SXM:8"], "it is an even number from 4 to 16"),
        (["--devices", "8"], "--devices 8 needs --paced"),
        (["--seed", "3"], "--seed needs --simulate TRACE"),
        (["--simulate", "philly:1", "--paced"], "--paced is of a measurement, which --simulate is none"),
    ],
)
def test_what_does_not_fit_together_is_said_before_anything_starts(
    options: list[str], said: str, asked: list[SharingPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["bench", "sharing", *options]) == 2
    assert said in capsys.readouterr().err
    assert asked == []
