"""The stacks of a process's threads, and whether it hangs itself or waits for one that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from train_jobs.watch.rank_stacks import RankStacks, waits_for_others

BEAT = """\
Thread 0x00007f01 (most recent call first):
  File "/x/train_jobs/rank/process.py", line 75 in tell
  File "/usr/lib/python3.11/threading.py", line 982 in run

"""
LOOP = """\
  File "/x/train_jobs/rank/loop.py", line 300 in _totals
  File "/x/train_jobs/rank/loop.py", line 150 in step
"""
WAIT = '  File "/usr/lib/python3.11/threading.py", line 331 in wait\n'


def stacks(main: str, header: str = "Current thread") -> str:
    """As faulthandler writes them: the main thread is the oldest, and the last."""
    return f"{BEAT}{header} 0x00007f02 (most recent call first):\n{main}"


@pytest.mark.parametrize("header", ["Current thread", "Thread"])
@pytest.mark.parametrize(
    ("main", "waits"),
    [
        ('  File "/v/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n' + LOOP, True),
        (
            WAIT + '  File "/x/train_jobs/elastic/exchange.py", line 111 in _wait_for_end\n' + LOOP,
            True,
        ),
        ('  File "/v/torch/nn/parallel/distributed.py", line 9 in _pre_forward\n' + LOOP, True),
        ('  File "/v/torch/autograd/graph.py", line 823 in _engine_run_backward\n' + LOOP, True),
        (LOOP, True),
        ('  File "/home/me/task.py", line 3 in loss\n' + LOOP, False),
        # FSDP calls the model from its own hooks: what counts is where it is, not who called.
        (
            '  File "/home/me/task.py", line 3 in forward\n'
            '  File "/v/torch/distributed/fsdp/_state.py", line 5 in hook\n',
            False,
        ),
        (WAIT + '  File "/home/me/task.py", line 3 in loss\n' + LOOP, False),
        ("", False),
    ],
    ids=[
        "collective",
        "groups",
        "DDP",
        "backward",
        "totals",
        "own code",
        "own code in FSDP",
        "own lock",
        "nothing",
    ],
)
def test_who_waits_for_others_is_told_from_who_hangs(main: str, waits: bool, header: str) -> None:
    assert waits_for_others(stacks(main, header)) is waits


SLEEPER = """
import threading, time
from train_jobs.watch.rank_stacks import write_stacks_when_asked
stacks = write_stacks_when_asked()
def deep(calls):
    return deep(calls - 1) if calls else time.sleep(600)
for _ in range(30):
    threading.Thread(target=deep, args=(40,), daemon=True).start()
def where_it_hangs():
    print(stacks, flush=True)
    time.sleep(600)
where_it_hangs()
"""

BUSY = "import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], RankStacks]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, RankStacks(process.pid, int(process.stdout.readline()))
    process.kill()
    process.wait()


@pytest.mark.parametrize("stopped", [False, True])
def test_stacks_are_had_of_a_process_that_sleeps_or_is_stopped(
    sleeper: tuple[subprocess.Popen[str], RankStacks], stopped: bool
) -> None:
    process, stacks = sleeper
    if stopped:
        process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    wanted = "stopped by a signal" if stopped else "sleeping"
    while stacks.state() != wanted:
        assert time.monotonic() < deadline, stacks.state()
    first, second = stacks.dump(), stacks.dump()
    for dump in (first, second):
        assert dump is not None
        assert dump.count("where_it_hangs") == 1
        assert dump.count("(most recent call first)") == 31
    stacks.kill()
    killed_at = time.monotonic()
    assert stacks.dump() is None  # nobody has waited for it yet
    assert time.monotonic() - killed_at < 2.5  # it waits for 3 where something may come
    assert process.wait(5) == -signal.SIGKILL
    assert stacks.state() == "gone"
    assert stacks.dump() is None


DIES_WHEN_LOOKED_AT = """
import os, signal, time
from train_jobs.watch.rank_stacks import write_stacks_when_asked
stacks = write_stacks_when_asked()
signal.signal(signal.SIGUSR2, signal.SIG_DFL)
def where_it_hangs():
    print(stacks, flush=True)
    time.sleep(600)
where_it_hangs()
"""


def test_the_main_threads_stack_is_had_of_a_process_that_dies_when_the_others_are_looked_at() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DIES_WHEN_LOOKED_AT], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        stacks = RankStacks(process.pid, int(process.stdout.readline()))
        dump = stacks.dump()
    assert process.returncode == -signal.SIGUSR2
    assert dump is not None
    assert "where_it_hangs" in dump
    assert not waits_for_others(dump)


def test_stacks_are_had_whole_of_a_process_that_hardly_gets_to_run(
    sleeper: tuple[subprocess.Popen[str], RankStacks],
) -> None:
    process, stacks = sleeper
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", BUSY.format(core=core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        try:
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), [core])
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
            dump = stacks.dump()
        finally:
            busy.kill()
    assert dump is not None
    assert dump.count("where_it_hangs") == 1  # of the main thread, which is written last
