"""The scenarios that are named are run, each to its end, and what came of them is one table."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from infra.cli.main import call
from infra.lab.faults import trials
from infra.lab.faults.laboratory import Laboratory
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios import SCENARIOS
from infra.lab.faults.trials import HEADINGS, FaultRow, chosen, document, run, table


def scenario(name: str, outcome: FaultOutcome | ShoalError, missing: str | None = None) -> Scenario:
    def act(lab: Laboratory, repeats: int) -> FaultOutcome:
        if isinstance(outcome, ShoalError):
            raise outcome
        return FaultOutcome(outcome.trials * repeats, outcome.wrong, outcome.bar_s)

    return Scenario(name, f"what {name} is", act, lambda: missing)


def trial(seconds: float, repeated: int = 0, failure_class: str = "worker") -> Trial:
    failure = {"failure_class": failure_class, "rank": 1, "node": "n"}
    return Trial(seconds, "checkpoint", found_s=seconds / 2, failure=failure, repeated=repeated)


def test_median_and_worst_of_all_trials_stand_in_the_table() -> None:
    outcome = FaultOutcome([trial(9.0, 3), trial(2.0, 12), trial(4.0, 1)], bar_s=9.1)
    (line,) = table([FaultRow(scenario("killed", outcome), outcome)])
    found = dict(zip(HEADINGS, line, strict=True))
    assert (found["scenario"], found["next step"], found["worst"], found["of"]) == (
        "killed",
        "4.0",
        "9.0",
        "3",
    )
    assert (found["found"], found["bar"], found["from"], found["again"]) == ("2.0", "9.1", "checkpoint", "12")
    assert found["class"] == "worker"


def test_classes_that_differ_are_all_in_the_table() -> None:
    outcome = FaultOutcome([trial(1.0), trial(1.0, failure_class="node"), trial(1.0)])
    (line,) = table([FaultRow(scenario("killed", outcome), outcome)])
    assert line[-1] == "worker (2), node (1)"


def test_what_goes_wrong_in_one_scenario_keeps_no_other_from_being_done() -> None:
    said: list[str] = []
    running = run(
        [
            scenario("broken", ShoalError("it does not stop")),
            scenario("absent", FaultOutcome([]), missing="not as this user"),
            scenario("fine", FaultOutcome([trial(1.0)])),
            scenario("wrong", FaultOutcome([trial(1.0)], wrong=["steps [6] were never done"])),
        ],
        repeats=2,
        say=said.append,
    )
    rows = list(running)
    assert [row.ok for row in rows] == [False, True, True, False]
    found = document(rows, repeats=2)
    assert found["ok"] is False
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    broken, absent, fine, _ = found["scenarios"]
    assert (broken["wrong"], broken["median_s"]) == (["it does not stop"], None)
    assert absent["skipped"] == "not as this user"
    assert [each["seconds"] for each in fine["trials"]] == [1.0, 1.0]
    assert "wrong: steps [6] were never done" in said
    assert "fine: 1.0 s; found after 0.5 s; worker, rank 1 on n; from checkpoint; 0 steps again" in said
    assert [line[1] for line in table(rows)] == ["failed", "not as this user", "1.0", "1.0"]


def test_all_scenarios_are_run_unless_some_are_named_and_those_on_one_cluster_in_turn() -> None:
    assert {each.name for each in chosen(())} == set(SCENARIOS)
    uses = [each.use for each in chosen(())]
    assert uses == sorted(uses)
    assert [each.name for each in chosen(["head-lost", "rank-killed"])] == ["rank-killed", "head-lost"]


@pytest.mark.parametrize("arguments", [["no-such-fault"], ["rank-killed", "no-such-fault", "--json"]])
def test_a_scenario_that_is_not_there_is_refused_and_nothing_starts(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "run", lambda *_: pytest.fail("it was run"))
    assert call(["bench", "faults", *arguments]) == 2
    error = capsys.readouterr().err
    assert "no-such-fault" in error
    assert "rank-killed" in error


def test_standard_output_holds_one_document_whatever_else_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def noisy(*_: object) -> list[FaultRow]:
        print("(raylet) Raylet is terminated")
        outcome = FaultOutcome([trial(1.0)], wrong=["a lease is left"])
        return [FaultRow(scenario("rank-killed", outcome), outcome)]

    monkeypatch.setattr(trials, "run", noisy)
    assert call(["bench", "faults", "rank-killed", "--json"]) == 1, "something was wrong"
    printed = capsys.readouterr()
    assert json.loads(printed.out)["scenarios"][0]["wrong"] == ["a lease is left"]
    assert "Raylet is terminated" in printed.err


@pytest.mark.parametrize("done", [["rank-killed"], []])
def test_who_interrupts_hours_of_faults_gets_what_has_been_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: list[str]
) -> None:
    def interrupted(*_: object) -> Iterator[FaultRow]:
        for name in done:
            outcome = FaultOutcome([trial(1.0)])
            yield FaultRow(scenario(name, outcome), outcome)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(trials, "run", interrupted)
    try:
        assert call(["bench", "faults", "rank-killed", "group-killed", "--json"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr()
    if done:
        assert [each["name"] for each in json.loads(printed.out)["scenarios"]] == done
        assert "after 1 of 2 scenarios" in printed.err
    else:
        assert printed.out == ""


def test_the_list_says_what_cannot_be_done_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "faults", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed] == [each.name for each in chosen(())]
    assert all(each["what"] for each in listed)
