"""What a job's control logs of what the ranks report, and what is read of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.files import line_writer
from cluster.files.storage import Storage
from cluster.files.time_limit import within
from tests.object_store import reached, uri
from train_jobs.records import control as module
from train_jobs.records.control import PATIENCE_S, SAVES_FOR_S, JobControl
from train_jobs.records.run_log import EVENTS, METRICS, read_all_metrics, read_metrics


def line(step: int, attempt: int = 1, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "loss": loss, **more}


@pytest.fixture
def control(tmp_path: Path) -> Iterator[JobControl]:
    (tmp_path / "run").mkdir()  # as whoever submits a job does
    made = JobControl(str(tmp_path / "run"))
    yield made
    made.log.close()


def logged(tmp_path: Path) -> list[tuple[int, int, float]]:
    """What stands in the file, as any reader finds it."""
    lines = read_all_metrics(Storage(tmp_path / "run"))
    assert len((tmp_path / "run" / f"{METRICS}.jsonl").read_text().splitlines()) == len(lines)
    return [(each["attempt"], each["step"], each["loss"]) for each in lines]


def test_a_step_that_several_groups_report_is_logged_once(control: JobControl, tmp_path: Path) -> None:
    for each in (line(1), line(1), line(2), line(1), line(2), line(3)):
        control.metrics([each])
    assert logged(tmp_path) == [(1, 1, 1.0), (1, 2, 1.0), (1, 3, 1.0)]
    assert control.last_step() == 3


def test_a_step_that_the_leader_died_with_is_logged_when_another_says_it(
    control: JobControl, tmp_path: Path
) -> None:
    control.metrics([line(7)])
    control.metrics([line(8)])  # by the next leader, which did it too and could not know whether it was said
    control.metrics([line(9)])
    assert [step for _, step, _ in logged(tmp_path)] == [7, 8, 9]


def test_no_step_waits_for_a_storage_that_fails(control: JobControl, tmp_path: Path) -> None:
    control.metrics([line(1)])
    file = tmp_path / "run" / f"{METRICS}.jsonl"
    file.rename(file.with_suffix(".away"))
    file.mkdir()
    began = time.monotonic()
    for step in (2, 3, 4):
        control.metrics([line(step)])
    assert time.monotonic() - began < PATIENCE_S / 2
    file.rmdir()
    file.with_suffix(".away").rename(file)
    assert control.log.wait(10.0)
    assert [step for _, step, _ in logged(tmp_path)] == [1, 2, 3, 4]


def test_a_step_of_another_attempt_is_logged_again_though_its_loss_is_the_same(
    control: JobControl, tmp_path: Path
) -> None:
    for each in (line(200), line(201), line(201, attempt=2), line(202), line(202, attempt=2)):
        control.metrics([each])
    assert logged(tmp_path) == [(1, 200, 1.0), (1, 201, 1.0), (2, 201, 1.0), (2, 202, 1.0)]
    assert [each["attempt"] for each in read_metrics(Storage(tmp_path / "run"))] == [1, 2, 2]


def test_a_job_that_went_back_logs_its_steps_again(control: JobControl, tmp_path: Path) -> None:
    for each in (
        line(50),
        line(51),
        line(51, loss=0.5, went_back=1),
        line(52),
        line(52, loss=0.4, went_back=1),
    ):
        control.metrics([each])
    assert logged(tmp_path) == [(1, 50, 1.0), (1, 51, 1.0), (1, 51, 0.5), (1, 52, 0.4)]
    assert [each["loss"] for each in read_metrics(Storage(tmp_path / "run"))] == [1.0, 0.5, 0.4]


def test_a_group_that_stood_still_reports_nothing_that_the_others_left_behind(
    control: JobControl, tmp_path: Path
) -> None:
    for each in (line(52), line(53), line(54), line(53, loss=0.9), line(55)):
        control.metrics([each])
    assert logged(tmp_path) == [(1, 52, 1.0), (1, 53, 1.0), (1, 54, 1.0), (1, 55, 1.0)]


def test_what_a_control_logs_twice_after_its_own_end_is_read_once(
    control: JobControl, tmp_path: Path
) -> None:
    control.metrics([line(1)])
    control.metrics([line(2)])
    again = JobControl(str(tmp_path / "run"))  # it knows nothing of what was logged
    again.metrics([line(2)])
    again.metrics([line(3)])
    again.log.close()
    assert len((tmp_path / "run" / f"{METRICS}.jsonl").read_text().splitlines()) == 4
    assert [each["step"] for each in read_all_metrics(Storage(tmp_path / "run"))] == [1, 2, 3]


def test_another_control_takes_nothing_that_may_have_lines_before_it_which_were_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    run = tmp_path / "run"
    first = started_over(tmp_path / "away")  # nothing can be written there
    assert first.metrics([line(1)])["unwritten"] == 1
    answer = first.metrics([line(2)], first.metrics([])["life"])
    assert (answer["taken"], answer["unwritten"]) == (True, 2)
    run.mkdir()
    again = started_over(run)
    refused = again.metrics([line(3)], answer["life"])
    assert (refused["taken"], refused["unwritten"]) == (False, 0)
    assert again.metrics([line(1), line(2), line(3)], refused["life"])["unwritten"] == 0
    assert [step for _, step, _ in logged(tmp_path)] == [1, 2, 3]


def test_an_event_is_written_when_it_is_answered_where_the_storage_cannot_append() -> None:
    with reached() as port:
        control = started_over(uri(port, "run"))
        control.event("saved")
        control.event("started", attempt=1)  # parts are written with a pause between them
        again = started_over(uri(port, "run"))
        assert (again.script_saves(), again.has_started(1)) == (1, True)
        assert control.metrics([line(1)])["unwritten"] == 1, "steps do not wait"
        for each in (control, again):
            each.log.close()


def test_a_group_saves_for_as_long_as_it_says_so(
    control: JobControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("train_jobs.records.control.time.monotonic", lambda: now[0])
    assert not control.is_saving("1-0")
    control.saves("1-0")
    assert (control.is_saving("1-0"), control.is_saving("1-1")) == (True, False)
    now[0] += 0.9 * SAVES_FOR_S
    assert control.is_saving("1-0")
    now[0] += 0.2 * SAVES_FOR_S
    assert not control.is_saving("1-0")


def test_steps_are_logged_again_that_groups_did_which_all_were_lost_within_an_attempt(
    control: JobControl, tmp_path: Path
) -> None:
    for each in (line(20), line(25), line(21, began=5), line(25, began=5), line(25), line(26, began=5)):
        control.metrics([each])
    assert [step for _, step, _ in logged(tmp_path)] == [20, 25, 21, 25, 26]


# -- a start over a storage in trouble ----------------------------------------------------------------------


def started_over(location: Path | str) -> JobControl:
    """A control that has started: one whose constructor hangs is not waited for."""
    control = within(60.0, lambda: JobControl(str(location)), otherwise=None)
    assert control is not None, "its constructor did not return"
    return control


def test_a_control_starts_over_events_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run" / f"{EVENTS}.jsonl").mkdir(parents=True)
    control = started_over(tmp_path / "run")
    control.metrics([line(1)])
    assert control.log.wait(60.0)
    assert logged(tmp_path) == [(1, 1, 1.0)]


def test_a_control_starts_over_events_whose_reading_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READ_S", 0.1)
    (tmp_path / "run").mkdir()
    pipe = tmp_path / "run" / f"{EVENTS}.jsonl"
    os.mkfifo(pipe)  # whoever opens it to read waits for somebody who writes
    control = started_over(tmp_path / "run")
    try:
        control.metrics([line(1)])
        assert control.log.wait(60.0)
        assert logged(tmp_path) == [(1, 1, 1.0)]
    finally:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def test_a_control_starts_over_a_storage_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    control = started_over("s3://bucket/run?no_such_option=1")
    answer = control.metrics([line(1)])
    assert (answer["stop"], answer["taken"]) == (False, True)
    assert not control.log.answered(60.0)
    assert "no_such_option" in str(control.log.trouble)


def test_a_control_that_starts_while_the_file_system_is_away_makes_no_directory_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    run, away = tmp_path / "run", tmp_path / "away"
    away.mkdir()
    control = started_over(run)
    control.metrics([line(1)])
    assert not control.log.answered(60.0)
    assert "not there any more" in str(control.log.trouble)
    assert not run.exists()
    away.rename(run)
    control.metrics([line(2)])
    assert control.log.wait(60.0)
    assert [step for _, step, _ in logged(tmp_path)] == [1, 2]


def test_what_is_no_event_of_a_run_keeps_no_control_from_starting(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"{EVENTS}.jsonl").write_text(
        '{}\n[]\n{"kind": "saved"}\n{"kind": "started", "attempt": 1}\n{"ki'
    )
    control = started_over(tmp_path / "run")
    assert (control.script_saves(), control.has_started(1)) == (1, True)
