"""How a person is told where the time of a job went."""

from __future__ import annotations

from infra.job_account import goodput_line
from train_jobs.records.goodput import Goodput


def test_the_greatest_loss_comes_first_and_what_cost_nothing_is_left_out() -> None:
    losses = {"starting": 6.0, "checkpoints": 0.01, "after_hang": 120.5, "other": 3.49}
    account = Goodput(queued_s=9, useful_s=370, losses_s=losses, steps=74)
    assert goodput_line(account.as_json()) == (
        "goodput 74.0%: 370.0 s of useful steps in 500.0 s; lost to hang failures 120.5 s, starting 6.0 s,"
        " other 3.5 s"
    )


def test_a_job_without_a_lease_has_nothing_to_tell_and_a_script_no_share() -> None:
    assert goodput_line(Goodput(queued_s=9).as_json()) == ""
    script = Goodput(losses_s={"starting": 2.0, "other": 8.0})
    assert goodput_line(script.as_json()) == "no step was logged in 10.0 s: other 8.0 s, starting 2.0 s"
