"""What tests ask of processes that may have ended."""

from __future__ import annotations

import subprocess
import time

import psutil

from tests.processes import children_with


def test_one_that_has_ended_and_that_nobody_has_waited_for_is_left_out() -> None:
    lives = subprocess.Popen(["sleep", "97.3"])
    ended = subprocess.Popen(["sleep", "0"])
    try:
        while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert [each.pid for each in children_with("97.3")] == [lives.pid]
    finally:
        for process in (lives, ended):
            process.kill()
            process.wait()
