"""What `shoal status` says about an app's last rollout, and about nodes that fail jobs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from infra.cli.cluster import avoided_lines, gateway_lines, rollout_line

RUNNING: dict[str, Any] = {
    "strategy": "rolling",
    "from_version": "m@1",
    "to_version": "m@2",
    "status": "running",
    "reason": None,
    "seconds": 4.2,
    "ready": 1,
}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "rolling m@1 → m@2: 1 ready, 4 s"),
        ({"stage": "drains"}, "rolling m@1 → m@2: drains, 4 s"),
        ({"strategy": "blue_green", "switched": True}, "blue_green m@1 → m@2: holding, 4 s"),
        ({"status": "succeeded", "reason": "m@latest changed"}, "m@2: succeeded, 4 s (m@latest changed)"),
        ({"status": "rolled_back", "reason": "asked for"}, "m@2: rolled back, 4 s (asked for)"),
        ({"status": "failed", "reason": "Traceback\n  in x\nValueError: no"}, "failed, 4 s (ValueError: no)"),
        ({"strategy": "start", "from_version": None}, "start → m@2: 1 ready, 4 s"),
    ],
)
def test_a_rollout_is_told_in_a_line(facts: dict[str, Any], said: str) -> None:
    line = rollout_line({**RUNNING, **facts})
    assert line.endswith(said)
    assert "\n" not in line


def test_a_first_start_that_went_well_is_no_news() -> None:
    assert rollout_line(None) == ""
    assert rollout_line({**RUNNING, "strategy": "start", "status": "succeeded"}) == ""


def test_a_node_that_is_avoided_is_told_with_its_reason_and_how_to_end_that() -> None:
    verdict = {"reason": "3 failures of job/lm within 9 minutes", "until": "2026-03-01T10:20:00+00:00"}
    nodes = [{"name": "worker-1", "avoided": verdict}, {"name": "worker-2", "avoided": None}]
    (line,) = avoided_lines(nodes)
    here = datetime(2026, 3, 1, 10, 20, tzinfo=UTC).astimezone()
    assert line == (
        f"worker-1 is avoided until {here:%d %b %H:%M}: 3 failures of job/lm within 9 minutes;"
        " `shoal forgive worker-1` ends that"
    )


def gateway(
    node: str, url: str | None = "http://10.0.0.1:8000", failure: str | None = None
) -> dict[str, Any]:
    return {"node": node, "url": url, "failure": failure}


def test_where_several_gateways_are_is_told() -> None:
    assert gateway_lines({"gateways": [gateway("n1")], "front": None}) == []
    two = [gateway("n1"), gateway("n2", "http://10.0.0.2:8000"), gateway("n3", None, "no room")]
    assert gateway_lines({"gateways": two, "front": None}) == [
        "gateways   http://10.0.0.1:8000 (n1), http://10.0.0.2:8000 (n2)",
        "n3 has no gateway: no room",
    ]


def test_a_front_that_is_away_says_why() -> None:
    front = {"runs": False, "failure": "cannot bind socket"}
    lost = [gateway("n1", None), gateway("n2", None)]
    assert gateway_lines({"gateways": lost, "front": front}) == [
        "the front of the gateways is away: cannot bind socket",
        "gateways   none is reached",
    ]
    assert gateway_lines({"gateways": [gateway("n1")], "front": {"runs": True, "failure": None}}) == []
