"""The oracle finds what it is there to find, and nothing where all is well."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from infra.soak.oracle import Asked, check_left, check_losses, check_requests, check_steps
from infra.soak.traffic import Traffic


def lines(*done: tuple[int, int]) -> list[dict[str, Any]]:
    """Of (attempt, step)."""
    return [{"attempt": attempt, "step": step, "loss": float(step)} for attempt, step in done]


def test_steps_in_order_are_right_and_so_are_those_done_again_from_a_checkpoint() -> None:
    assert check_steps("job", lines((1, 1), (1, 2), (1, 3), (1, 4)), 4) == []
    assert check_steps("job", lines((1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)), 4) == []
    assert check_steps("job", lines((1, 1), (1, 2), (3, 3), (3, 4)), 4) == []


@pytest.mark.parametrize(
    ("done", "found"),
    [
        (lines((1, 1), (1, 2), (1, 4)), "1 of 4 steps are missing, first 3"),
        (lines((1, 1), (1, 2), (1, 3)), "1 of 4 steps are missing, first 4"),
        (lines((1, 1), (1, 2), (1, 2), (1, 3), (1, 4)), "in attempt 1 step 2 follows step 2"),
        (lines((1, 1), (1, 3), (1, 2), (1, 4)), "in attempt 1 step 3 follows step 1"),
        (lines((1, 1), (2, 3), (2, 4)), "attempt 2 goes on with step 3 after step 1 of attempt 1"),
        (lines((1, 1), (2, 2), (1, 3), (1, 4)), "attempt 1 goes on with step 3 after step 2 of attempt 2"),
    ],
)
def test_steps_that_are_missing_repeated_or_out_of_order_are_found(
    done: list[dict[str, Any]], found: str
) -> None:
    assert f"job: {found}" in check_steps("job", done, 4)


def test_losses_are_those_of_the_undisturbed_run_within_the_tolerance() -> None:
    done = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0 + 1e-6}]
    assert check_losses("job", done, {1: 2.0, 2: 1.0}, 1e-5) == []
    (found,) = check_losses("job", done, {1: 2.0, 2: 1.0}, 0.0)
    assert found == "job: the loss of step 2 is 1.000001, undisturbed 1.0"
    assert check_losses("job", [{"step": 1, "loss": float("nan")}], {1: 2.0}, 1.0) != []


def test_a_request_is_answered_refused_with_a_reason_broken_off_with_one_or_lost() -> None:
    assert Asked(200, True).outcome == "answered"
    assert Asked(200, True, "the replica ended").outcome == "broken"
    assert Asked(503, True, "no replica runs").outcome == "refused"
    lost = [
        Asked(503, True),
        Asked(200, False, "closed"),
        Asked(None, False, "refused"),
        Asked(500, True, "bug"),
    ]
    assert [one.outcome for one in lost] == ["lost"] * 4
    assert check_requests([Asked(200, True), Asked(429, True, "full")]) == []
    assert check_requests([*lost, lost[2]])[0] == "2 requests were lost (None: refused)"


def test_what_is_left_is_named() -> None:
    assert check_left([], [], []) == []
    found = check_left([{"holder": "job/a"}], ["ray::X (7)"], ["/s/ray_train"])
    assert found == ["the lease of job/a is left", "process ray::X (7) is left", "/s/ray_train is left"]


class _Answers(BaseHTTPRequestHandler):
    """Answers in turn as a gateway may."""

    turns: Iterator[str] = iter(())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = next(self.turns, "whole")
        if kind == "refused":
            body = b'{"error": {"message": "no replica runs", "type": "x", "param": null, "code": null}}'
            self.send_response(503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        if kind == "broken":
            self.wfile.write(b'data: {"error": {"message": "the replica ended"}}\n\n')
        elif kind == "whole":
            self.wfile.write(b"data: [DONE]\n\n")
        if kind != "cut off":
            self.wfile.write(b" " * 1000)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def gateway() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_traffic_notes_what_the_gateway_did(gateway: str) -> None:
    _Answers.turns = iter(["whole", "refused", "broken", "cut off"])
    with Traffic(gateway, "chat", "a", 4) as traffic:
        traffic.set(1)
        while len(traffic.asked) < 5:
            time.sleep(0.01)
    outcomes = [one.outcome for one in traffic.asked[:5]]
    assert outcomes == ["answered", "refused", "broken", "lost", "answered"], traffic.asked[:5]
    assert traffic.asked[1].detail == "no replica runs"
