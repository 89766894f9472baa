"""Processes that an engine's library starts: they end with the engine, and with its process, in any state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from serve_apps.engine.process_family import ProcessFamily
from tests.processes import children_with

QUICKLY_S = 10.0

CHILD = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""

PARENT = """
import subprocess, sys, time
from serve_apps.engine.process_family import ProcessFamily
family = ProcessFamily()
print(family.directory, flush=True)
with family.growing():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    grandchild = child.stdout.readline().decode()
    if sys.argv[2] == "while starting":
        time.sleep(1)
        print(child.pid, grandchild, flush=True)
        time.sleep(600)
print(child.pid, grandchild, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + QUICKLY_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that waits to be collected has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_child() -> tuple[subprocess.Popen[bytes], int]:
    """A process, and the id of the one that it started."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


@pytest.fixture
def family() -> Iterator[ProcessFamily]:
    family = ProcessFamily()
    yield family
    family.end()


@pytest.fixture
def started(family: ProcessFamily) -> Iterator[tuple[int, int]]:
    """The ids of a child of the family, and of what that started."""
    with family.growing():
        child, grandchild = start_child()
    yield child.pid, grandchild
    child.kill()
    child.wait()


@pytest.fixture
def stranger() -> Iterator[tuple[int, int]]:
    """Those of a child that is none of the family's."""
    child, grandchild = start_child()
    yield child.pid, grandchild
    os.kill(grandchild, signal.SIGKILL)
    child.kill()
    child.wait()


def test_what_came_while_it_grew_ends_and_nothing_else(
    stranger: tuple[int, int], family: ProcessFamily, started: tuple[int, int]
) -> None:
    assert {process.pid for process in family.members()} == set(started)
    later = start_child()
    try:
        family.look()
        family.kill()
        assert family.members() == []
        assert all(map(is_gone, started))
        assert not any(map(is_gone, (*stranger, later[0].pid, later[1])))
    finally:
        os.kill(later[1], signal.SIGKILL)
        later[0].kill()
        later[0].wait()


def test_a_stopped_process_and_one_whose_parent_is_gone_end_too(
    family: ProcessFamily, started: tuple[int, int]
) -> None:
    child, grandchild = started
    os.kill(grandchild, signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    until(lambda: is_gone(child))
    assert not is_gone(grandchild)
    family.kill()
    assert is_gone(grandchild)


def test_the_end_of_a_family_leaves_nothing(family: ProcessFamily, started: tuple[int, int]) -> None:
    family.end()
    assert all(map(is_gone, started))
    assert not family.directory.exists()
    family.end()  # again does no harm


@pytest.mark.parametrize("moment", ["while starting", "afterwards"])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_parent_leaves_nothing_behind(moment: str, stopped: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, moment],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
    )
    assert parent.stdout is not None
    directory = Path(parent.stdout.readline().strip())
    child, grandchild = map(int, parent.stdout.readline().split())
    guards = children_with("process_guard", parent.pid)
    assert len(guards) == 1
    assert directory.is_dir()
    if stopped:
        os.kill(grandchild, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    until(lambda: is_gone(child) and is_gone(grandchild) and is_gone(guards[0].pid))
    assert not directory.exists()


def test_pythons_resource_tracker_is_left_to_clean_up(family: ProcessFamily) -> None:
    tracker = "from multiprocessing.resource_tracker import main; import time; time.sleep(600)"
    with family.growing():
        child = subprocess.Popen([sys.executable, "-c", tracker])
    try:
        assert family.members() == []
        family.kill()
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
