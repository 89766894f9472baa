"""What a person reads of a job that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.files.storage import Storage
from infra.job_logs import JobLogs, follow
from infra.job_view import JobView, figures, sentence


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"kind": "waiting", "min": 2, "max": 2}, "waiting for a lease of 2 workers"),
        ({"kind": "waiting", "min": 1, "max": 1}, "waiting for a lease of 1 worker"),
        ({"kind": "waiting", "min": 1, "max": 4}, "waiting for a lease of 1 to 4 workers"),
        ({"kind": "leased", "workers": 1, "nodes": ["worker-1"]}, "leased 1 worker on worker-1; starting"),
        (
            {"kind": "started", "attempt": 2, "world_size": 2, "step": 50},
            "attempt 2: 2 workers from step 50 on",
        ),
        (
            {
                "kind": "failed",
                "attempt": 1,
                "failure_class": "code",
                "rank": 0,
                "node": "n",
                "reason": "a\nb",
            },
            "attempt 1 failed: code (rank 0 on n): a",
        ),
        ({"kind": "recovered", "workers": 1, "after": "node"}, "going on with 1 worker after a node failure"),
        ({"kind": "submitted"}, None),
        (
            {"kind": "step_skipped", "step": 7, "reason": "the loss is nan"},
            "step 7 is skipped: the loss is nan",
        ),
        (
            {"kind": "loss_spike", "step": 7, "reason": "the loss is 9, above 6"},
            "step 7: the loss is 9, above 6",
        ),
        (
            {"kind": "went_back", "step": 7, "to": 5, "reason": "the loss is nan", "passed_over": [6]},
            "back from step 7 to step 5: the loss is nan",
        ),
        (
            {"kind": "straggler", "rank": 1, "node": "worker-2", "times_slower": 3.04, "steps": 12},
            "rank 1 on worker-2 is 3.0 times slower than the other ranks, over 12 steps",
        ),
        (
            {
                "kind": "straggler_over",
                "rank": 0,
                "group": "1-2",
                "node": None,
                "times_slower": 1.1,
                "steps": 40,
            },
            "rank 0 of group 1-2 is as fast as the other ranks again",
        ),
        (
            {"kind": "straggler_over", "rank": 0, "group": "1-2", "times_slower": None, "steps": 40},
            "rank 0 of group 1-2 is gone",
        ),
        (
            {"kind": "started", "attempt": 1, "world_size": 1, "step": 7, "group": "1-3", "workers": 3},
            "group 1-3: 1 worker from step 7 on, 3 in all",
        ),
        (
            {"kind": "resized", "step": 9, "world_size": 2, "joined": ["1-4"], "left": [], "lost": ["1-0"]},
            "2 workers from step 9 on: group 1-4 joined, group 1-0 is lost",
        ),
        (
            {"kind": "leaving", "group": "1-2", "for_whom": ["app/chat/1"]},
            "group 1-2 has to leave, for app/chat/1",
        ),
        (
            {"kind": "reclaimed", "group": "1-2", "after_s": 30.0},
            "group 1-2 did not leave within 30 s, and is taken down",
        ),
        (
            {"kind": "rebuilding", "workers": 3, "to": 2},
            "saving, to go on with 2 workers instead of 3",
        ),
        (
            {
                "kind": "failed",
                "attempt": 1,
                "group": "1-2",
                "goes_on": True,
                "failure_class": "worker",
                "node": None,
                "reason": "it ended",
            },
            "group 1-2 failed: worker: it ended",
        ),
        (
            {"kind": "started", "attempt": 1, "world_size": 1, "step": 0, "notes": ["no GPU"]},
            "attempt 1: 1 worker from step 0 on\nno GPU",
        ),
        (
            {"kind": "evaluated", "attempt": 1, "step": 5, "loss": 1.0, "accuracy": 0.5, "samples": 9},
            "evaluation at step 5: loss 1.0000, accuracy 0.5000 over 9 held-out samples",
        ),
        (
            {"kind": "checkpoint_rejected", "step": 5, "reason": ".metadata is missing"},
            "the checkpoint of step 5 is damaged and passed over: .metadata is missing",
        ),
        (
            {
                "kind": "measured",
                "steps": 9,
                "tokens_per_s": 25180.8,
                "mfu": 0.123,
                "peak_flops": 1.5e12,
                "peak_flops_from": "measured",
                "data_wait": 0.004,
                "communication": 0.054,
                "peak_memory_bytes": 430_000_000,
            },
            "25,181 tokens/s (median of 9 steps), MFU 12.3% of 1.50 TFLOP/s, measured, waiting for data "
            "0.4%, exposed communication 5.4%, peak memory 0.43 GB",
        ),
    ],
)
def test_an_event_is_said_in_a_sentence_or_not_at_all(event: dict[str, Any], said: str | None) -> None:
    assert sentence(event) == said


def test_a_step_whose_loss_was_no_number_has_figures_too() -> None:
    line = {"loss": None, "tokens": 100, "step_s": 0.5}
    assert figures(line) == "loss none  200 tokens/s"


def test_a_driver_that_died_without_a_word_ends_the_following(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"time": "2026-01-01T00:00:00+00:00", "kind": "waiting", "min": 1, "max": 1}\n'
    )
    (tmp_path / "metrics.jsonl").write_text("")
    with JobView("job", 10) as view:
        assert follow(JobLogs(Storage(str(tmp_path)), "job"), lambda: "FAILED", view) == "FAILED"
    assert capsys.readouterr().err == "waiting for a lease of 1 worker\n"
