"""The oracle finds what it is there to find, and nothing where all is well."""

from __future__ import annotations

from typing import Any

import pytest

from infra.lab.bench.asking import FailedRequest
from infra.lab.soak.oracle import check_left, check_losses, check_requests, check_steps, outcome


def lines(*done: tuple[int, int]) -> list[dict[str, Any]]:
    """Of (attempt, step), a second apart."""
    return [
        {
            "attempt": attempt,
            "step": step,
            "loss": float(step),
            "world_size": 2,
            "time": f"2026-01-01T00:00:{second:02}.000+00:00",
        }
        for second, (attempt, step) in enumerate(done)
    ]


def test_steps_in_order_are_right_and_so_are_those_done_again_from_a_checkpoint() -> None:
    assert check_steps("job", lines((1, 1), (1, 2), (1, 3), (1, 4)), 4, [2]) == []
    assert check_steps("job", lines((1, 1), (1, 2), (1, 3), (2, 3), (2, 4)), 4, [2]) == []
    assert check_steps("job", lines((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (2, 4)), 4, [2]) == []
    assert check_steps("job", lines((1, 1), (1, 2), (3, 3), (3, 4)), 4, []) == []


def test_groups_that_were_all_lost_go_on_from_a_checkpoint_in_the_same_attempt() -> None:
    done = lines((1, 1), (1, 2), (1, 3), (1, 3), (1, 4))
    now, before = "2026-01-01T00:00:02.500+00:00", "2026-01-01T00:00:01.500+00:00"
    assert check_steps("job", done, 4, [2], [(now, "1-0"), (now, "1-1")]) == []
    for losses in ([(now, "1-0"), (before, "1-1")], [(now, "1-0"), (now, "1-0")]):
        (found,) = check_steps("job", done, 4, [2], losses)
        assert found == "job: step 3 is done again after step 3 of attempt 1, though 1 of 2 groups were lost"


def test_a_group_that_comes_back_goes_on_from_where_it_was() -> None:
    done = lines((1, 1), (1, 2), (1, 3), (1, 2), (1, 4))
    both = [("2026-01-01T00:00:02.500+00:00", group) for group in ("1-0", "1-1")]
    assert check_steps("job", done, 4, [1], both) == []
    # It had not got as far as one that was killed before.
    done = lines((1, 1), (1, 2), (1, 3), (1, 4), (1, 2), (1, 3), (1, 2), (1, 4))
    four = [(f"2026-01-01T00:00:0{at}.500+00:00", group) for at in (3, 5) for group in ("1-0", "1-1")]
    assert check_steps("job", done, 4, [1], four) == []
    (found,) = check_steps(
        "job",
        lines((1, 1), (1, 2), (1, 3), (1, 4), (1, 2), (1, 4)),
        4,
        [1],
        [("2026-01-01T00:00:03.500+00:00", group) for group in ("1-0", "1-1")],
    )
    assert found == "job: attempt 1 goes on with step 4 after step 2 of attempt 1"


@pytest.mark.parametrize(
    ("done", "found"),
    [
        (lines((1, 1), (1, 2), (1, 4)), "1 of 4 steps are missing, first 3"),
        (lines((1, 1), (1, 2), (1, 3)), "1 of 4 steps are missing, first 4"),
        (
            lines((1, 1), (1, 2), (1, 2), (1, 3), (1, 4)),
            "step 2 is done again after step 2 of attempt 1, though 0 of 2 groups were lost",
        ),
        (
            lines((1, 1), (1, 3), (1, 2), (1, 4)),
            "attempt 1 goes on with step 3 after step 1 of attempt 1",
        ),
        (
            lines((1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)),
            "step 2 is done again after step 3 of attempt 1, from no checkpoint",
        ),
        (lines((1, 1), (2, 3), (2, 4)), "attempt 2 goes on with step 3 after step 1 of attempt 1"),
        (lines((1, 1), (2, 2), (1, 3), (1, 4)), "attempt 1 goes on with step 3 after step 2 of attempt 2"),
    ],
)
def test_steps_that_are_missing_repeated_or_out_of_order_are_found(
    done: list[dict[str, Any]], found: str
) -> None:
    assert f"job: {found}" in check_steps("job", done, 4, [2])


def test_losses_are_those_of_the_undisturbed_run_within_the_tolerance() -> None:
    done = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0 + 1e-6}]
    assert check_losses("job", done, {1: 2.0, 2: 1.0}, 1e-5) == []
    (found,) = check_losses("job", done, {1: 2.0, 2: 1.0}, 0.0)
    assert found == "job: the loss of step 2 is 1.000001, undisturbed 1.0"
    assert check_losses("job", [{"step": 1, "loss": float("nan")}], {1: 2.0}, 1.0) != []


def test_a_request_is_refused_with_a_reason_broken_off_with_one_or_lost() -> None:
    def failure(status: int | None, told: bool, reason: str = "why") -> FailedRequest:
        return FailedRequest(0.0, 1.0, reason, told, status)

    assert outcome(failure(200, told=True)) == "broken"
    assert outcome(failure(503, told=True)) == "refused"
    assert outcome(failure(504, told=True)) == "timed_out"
    lost = [failure(503, False), failure(200, False), failure(None, False, "closed"), failure(500, told=True)]
    assert [outcome(each) for each in lost] == ["lost"] * 4
    assert check_requests([failure(429, told=True), failure(200, told=True)]) == []
    assert check_requests([lost[2], lost[2], lost[0]])[0] == (
        "2 requests were lost (closed), the first one sent at 00:00:00 UTC"
    )


def test_what_is_left_is_named() -> None:
    assert check_left([], [], []) == []
    found = check_left([{"holder": "job/a"}], ["ray::X (7)"], ["/s/ray_train"])
    assert found == ["the lease of job/a is left", "process ray::X (7) is left", "/s/ray_train is left"]
