"""Policies for steps that go wrong: what a job can carry out is taken, the rest said at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes, position


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.config.checks.engine_checks.find_spec", lambda name: object())


def text(recovery: str, job: str = "workers: {}") -> str:
    return f"train_jobs:\n  j:\n    {job}\n    recovery: {recovery}\n"


def test_policies_that_any_job_can_carry_out(tmp_path: Path) -> None:
    spike = "{policy: skip, window_steps: 100, threshold: 4}"
    given = load(tmp_path, text(f"{{non_finite_loss: go_back, loss_spike: {spike}, straggler_factor: null}}"))
    recovery = given.config.train_jobs["j"].recovery
    assert (recovery.non_finite_loss, recovery.straggler_factor) == ("go_back", None)
    assert (recovery.loss_spike.policy, recovery.loss_spike.threshold) == ("skip", 4.0)


def test_unless_told_otherwise_a_job_stops_for_no_number_and_looks_for_no_spikes(tmp_path: Path) -> None:
    recovery = load(tmp_path, text("{loss_spike: }")).config.train_jobs["j"].recovery
    assert (recovery.non_finite_loss, recovery.loss_spike.policy) == ("stop", None)


@pytest.mark.parametrize(
    ("recovery", "job", "marker", "path", "words"),
    [
        ("{non_finite_loss: ignore}", "workers: {}", "ignore", "non_finite_loss", "stop"),
        ("{loss_spike: {policy: stop}}", "workers: {}", "stop", "loss_spike.policy", "warn"),
        ("{loss_spike: {window_steps: 7}}", "workers: {}", "7", "loss_spike.window_steps", "8"),
        ("{skips_in_a_row: 0}", "workers: {}", "0", "skips_in_a_row", "1"),
        ("{straggler_factor: 1}", "workers: {}", "1}", "straggler_factor", "1"),
        (
            "{non_finite_loss: skip}",
            "parallel: {engine: deepspeed, deepspeed: {}}",
            "skip",
            "non_finite_loss",
            "should be stop under parallel.engine deepspeed, which makes its own updates; was skip",
        ),
        (
            "{loss_spike: {policy: go_back}}",
            "parallel: {engine: deepspeed, deepspeed: {}}",
            "go_back",
            "loss_spike.policy",
            "should be warn or null under parallel.engine deepspeed",
        ),
        (
            "{non_finite_loss: skip}",
            "parallel: {strategy: ddp, ddp: {compression: powersgd}}",
            "skip",
            "non_finite_loss",
            "should not be skip under parallel.ddp.compression powersgd",
        ),
    ],
)
def test_policies_that_a_job_cannot_carry_out(
    recovery: str, job: str, marker: str, path: str, words: str, tmp_path: Path
) -> None:
    content = text(recovery, job)
    (found,) = mistakes(tmp_path, content)
    assert (found.line, found.column) == position(content, marker)
    assert found.path == f"train_jobs.j.recovery.{path}"
    assert words in found.message
