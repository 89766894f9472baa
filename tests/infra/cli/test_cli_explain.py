"""`shoal explain`: which leases a name means, and what is said of one that has none."""

from __future__ import annotations

from typing import Any

import pytest

from infra.api.cluster_sight import holders_of, nothing_to_explain

HOLDERS = ["app/chat", "app/chat:3", "app/chatter", "job/lm-1", "job/lm-2", "job/other-1"]


def job(identity: str, name: str, status: str = "running") -> dict[str, Any]:
    return {"job": identity, "name": name, "status": status}


JOBS = [job("lm-1", "lm"), job("lm-2", "lm"), job("lm-3", "lm", "succeeded"), job("other-1", "other")]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("chat", ["app/chat", "app/chat:3"]),
        ("lm", ["job/lm-2"]),
        ("lm-1", ["job/lm-1"]),
        ("job/lm-1", ["job/lm-1"]),
        ("app/chatter", ["app/chatter"]),
        ("lm-3", []),
        ("cha", []),
    ],
)
def test_a_name_means_an_apps_leases_a_job_or_the_newest_job_of_a_name(name: str, meant: list[str]) -> None:
    assert holders_of(name, HOLDERS, JOBS) == meant


def test_an_app_and_a_job_of_one_name_are_both_meant() -> None:
    assert holders_of("x", ["app/x", "job/x-1"], [job("x-1", "x")]) == ["app/x", "job/x-1"]


@pytest.mark.parametrize(
    ("name", "said", "code"),
    [
        ("lm-3", "lm-3 has no lease: it succeeded", 1),
        ("typo", "nothing is called 'typo' here; known are chat, lm, other", 2),
    ],
)
def test_a_name_without_a_lease_gets_a_sentence(name: str, said: str, code: int) -> None:
    error = nothing_to_explain(name, ["app/chat"], JOBS)
    assert (str(error), error.exit_code) == (said, code)


def test_where_nothing_is_known_that_is_said() -> None:
    assert str(nothing_to_explain("x", [], [])).endswith("there are no jobs and no apps")
