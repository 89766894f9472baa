"""Whether a rank hangs itself or waits for one that does, from the stacks of its threads."""

from __future__ import annotations

import pytest

from train_jobs.rank_stacks import waits_for_others

BEAT = """\
Thread 0x00007f01 (most recent call first):
  File "/x/train_jobs/rank.py", line 75 in beat
  File "/usr/lib/python3.11/threading.py", line 982 in run

"""
LOOP = """\
  File "/x/train_jobs/loop.py", line 300 in _totals
  File "/x/train_jobs/loop.py", line 150 in step
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


def test_no_stack_is_no_excuse() -> None:
    assert not waits_for_others("no stack could be had: the process does not even answer a signal")
