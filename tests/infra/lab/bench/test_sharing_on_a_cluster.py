"""`shoal bench sharing` for real: devices change hands once, and nothing is lost or left behind."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil
import pytest

from tests.clusters import caller_environment, shoal_command

TIMEOUT_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 90)
def test_a_round_loses_no_step_and_no_request() -> None:
    process = subprocess.Popen(
        shoal_command("bench", "sharing", "--rounds", "1", "--json"),
        env=caller_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, said = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:  # it takes its cluster with it
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0, said
    found = json.loads(output)
    assert (found["ok"], found["problems"]) == (True, [])
    (only,) = found["rounds"]
    assert (only["workers_before"], only["workers_under_load"]) == (3, 2)
    for key in ("first_token", "training_back"):
        parts = [each["median_s"] for each in found[key]["parts"].values()]
        assert None not in parts
        assert sum(parts) == pytest.approx(found[key]["total"]["median_s"], abs=0.05)
    shared, fixed = found["sides"]["sharing"], found["sides"]["fixed"]
    for side in (shared, fixed):
        assert (side["steps_lost"], side["steps_repeated"], side["requests_failed"]) == (0, 0, 0)
        assert min(side["samples_per_s"], side["requests_per_s"], side["first_token_p50_s"]) > 0
        assert side["device_seconds"] == pytest.approx(4 * side["seconds"], rel=0.01)
    assert shared["seconds"] == pytest.approx(fixed["seconds"], abs=2.0)
    # Two workers and two replicas have the four devices for good.
    assert fixed["device_seconds_nobody"] == pytest.approx(0, abs=0.05 * fixed["device_seconds"])
    assert [each for each in psutil.process_iter() if f"bench-{process.pid}-" in _environment(each)] == []


def _environment(process: psutil.Process) -> str:
    try:
        return " ".join(process.environ().values())
    except psutil.Error:  # it has ended, or is not ours
        return ""
