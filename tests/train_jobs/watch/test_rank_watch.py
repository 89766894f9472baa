"""Who watches a rank's process ends it where it hangs, and does not take one that has ended for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from train_jobs.errors import RankError
from train_jobs.watch.flight_recorder import FlightRecorder
from train_jobs.watch.progress import Activity
from train_jobs.watch.rank_stacks import RankStacks
from train_jobs.watch.rank_watch import RankWatch

RANK = """
import os, select, sys, threading, time
from train_jobs.watch.rank_stacks import write_stacks_when_asked

def end_with(peer):
    # As a collective whose peer is killed: it ends at once, and the process with it.
    select.select([os.pidfd_open(peer)], [], [])
    os._exit(1)

stacks, peer = write_stacks_when_asked(), int(sys.argv[1])
if peer:
    threading.Thread(target=end_with, args=(peer,), daemon=True).start()
code = compile("def all_reduce():\\n    print(stacks, flush=True)\\n    time.sleep(600)", sys.argv[2], "exec")
exec(code)
all_reduce()
"""
IN_TORCH = "/v/torch/distributed/distributed_c10d.py"
OWN_CODE = "/home/me/task.py"
HANG_S = 100.0
"""On the clock of the test; waits of the product itself are real."""


@contextmanager
def rank(
    file: str, peer: int = 0, seen_as: type[RankStacks] = RankStacks
) -> Iterator[tuple[subprocess.Popen[str], RankStacks]]:
    """A process that stands in `all_reduce` of this file for ever, or until its peer is gone."""
    command = [sys.executable, "-c", RANK, str(peer), file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, seen_as(process.pid, int(process.stdout.readline()))
        process.kill()


def watched(
    number: int,
    process: RankStacks,
    keep: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
    recorder: FlightRecorder | None = None,
) -> RankWatch:
    """One whose rank has done nothing since 0 s."""
    watch = RankWatch(number, HANG_S, keep, 0.0, pause, recorder)
    watch.watch(process)
    watch.heard(Activity(1), 0.0)
    return watch


@pytest.mark.parametrize(("file", "waits"), [(IN_TORCH, True), (OWN_CODE, False)])
def test_a_rank_that_hangs_is_killed_and_its_stacks_are_kept(file: str, waits: bool) -> None:
    kept: list[str] = []
    with rank(file) as (process, stacks):
        watch = watched(3, stacks, kept.append)
        watch.heard(Activity(1), 0.9 * HANG_S)  # it speaks, and does nothing
        watch.end_if_it_hangs(0.8 * HANG_S)
        assert process.poll() is None
        with pytest.raises(RankError, match=r"done nothing for 99\.0 s \((sleeping|running)\)") as caught:
            watch.end_if_it_hangs(0.99 * HANG_S)
        assert process.wait(5) == -signal.SIGKILL
    assert (caught.value.rank, caught.value.hung, caught.value.collective) == (3, True, waits)
    assert kept == [caught.value.trace]
    assert f'File "{file}"' in kept[0]


def test_of_ranks_that_wait_for_each_other_none_is_killed_before_all_have_been_looked_at() -> None:
    kept: list[str] = []
    found: list[RankError] = []
    with rank(IN_TORCH) as (first, one), rank(IN_TORCH, first.pid) as (second, other):
        late = watched(1, other, kept.append)

        def meanwhile(_: float) -> None:
            if found:
                time.sleep(0.05)  # it waits for the end of the process
                return
            with pytest.raises(RankError) as caught:
                late.end_if_it_hangs(HANG_S)
            found.append(caught.value)
            assert first.poll() is None

        early = watched(0, one, kept.append, meanwhile)
        with pytest.raises(RankError) as caught:
            early.end_if_it_hangs(HANG_S)
        found.append(caught.value)
        assert first.wait(5) == -signal.SIGKILL
        assert second.wait(5) == -signal.SIGKILL
    assert [(each.rank, each.hung, each.collective) for each in found] == [(1, True, True), (0, True, True)]
    assert kept == [each.trace for each in found]
    assert all(IN_TORCH in trace for trace in kept)


def test_a_rank_that_hangs_is_killed_though_its_stacks_cannot_be_kept() -> None:
    with rank(OWN_CODE) as (process, stacks):

        def keep(_: str) -> None:
            assert process.wait(5) == -signal.SIGKILL
            raise TimeoutError("the storage does not answer")

        with pytest.raises(TimeoutError):
            watched(0, stacks, keep).end_if_it_hangs(HANG_S)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_rank_that_has_ended_does_not_hang(reaped: bool) -> None:
    kept: list[str] = []
    with rank(OWN_CODE) as (process, stacks):
        watch = watched(2, stacks, kept.append)
        process.kill()
        if reaped:
            process.wait(5)
        else:
            while stacks.state() != "dead":
                assert process.returncode is None
        for now in (HANG_S, HANG_S + 5, HANG_S + 9):
            watch.end_if_it_hangs(now)  # how it ended is for others to say
        with pytest.raises(RankError, match="nobody says how it ended") as caught:
            watch.end_if_it_hangs(HANG_S + 11)
    assert (caught.value.rank, caught.value.died, caught.value.hung) == (2, True, False)
    assert kept == []


def test_of_a_rank_that_has_ended_nobody_says_how_before_what_it_had_started_has_ended() -> None:
    with rank(OWN_CODE, seen_as=LeavesOneBehind) as (process, stacks):
        watch = watched(2, stacks, pytest.fail)
        process.kill()
        process.wait(5)
        for now in (HANG_S, HANG_S + 11, HANG_S + 39):
            watch.end_if_it_hangs(now)
        with pytest.raises(RankError, match="nobody says how it ended"):
            watch.end_if_it_hangs(HANG_S + 41)


class DiesWhenAsked(RankStacks):
    """A process that is killed between the first look at it and the dump of its stacks."""

    def dump(self) -> str | None:
        self.kill()
        while not self.is_dead():
            pass
        return super().dump()


def test_a_rank_that_ends_while_it_is_looked_at_does_not_hang() -> None:
    kept: list[str] = []
    with rank(OWN_CODE, seen_as=DiesWhenAsked) as (_, stacks):
        watch = watched(2, stacks, kept.append)
        watch.end_if_it_hangs(HANG_S)
    assert kept == []


def test_a_rank_that_never_says_a_word_hangs_without_a_process() -> None:
    watch = RankWatch(0, HANG_S, pytest.fail, 0.0)
    assert not watch.has_process
    watch.end_if_it_hangs(299.0)
    with pytest.raises(RankError, match="has not said a word") as caught:
        watch.end_if_it_hangs(301.0)
    assert caught.value.hung


def test_no_stack_is_no_excuse() -> None:
    kept: list[str] = []
    with rank(IN_TORCH) as (process, stacks):
        watch = watched(0, RankStacks(stacks.pid, 9999), kept.append)
        with pytest.raises(RankError) as caught:
            watch.end_if_it_hangs(HANG_S)
        assert process.wait(5) == -signal.SIGKILL
    assert kept == [caught.value.trace]
    assert "no stack could be had" in kept[0]
    assert not caught.value.collective


class SlowToDie(RankStacks):
    """As one whose devices or memory the kernel takes its time to free."""

    looks = 0

    def is_dead(self) -> bool:
        SlowToDie.looks += 1
        return SlowToDie.looks > 5 and super().is_dead()


def test_a_hang_is_told_when_the_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowToDie, "looks", 0)
    with rank(OWN_CODE, seen_as=SlowToDie) as (process, stacks):
        with pytest.raises(RankError) as caught:
            watched(0, stacks, lambda _: None).end_if_it_hangs(HANG_S)
        assert SlowToDie.looks > 5, "its devices were held still"
        assert RankStacks(process.pid, 0).is_dead()
    assert "had not ended" not in caught.value.message


class Undying(RankStacks):
    def is_dead(self) -> bool:
        return False


def test_of_a_process_that_does_not_end_that_is_said() -> None:
    pauses: list[float] = []
    with (
        rank(OWN_CODE, seen_as=Undying) as (_, stacks),
        pytest.raises(RankError, match="30 s after it was killed it had not ended"),
    ):
        watched(0, stacks, lambda _: None, pauses.append).end_if_it_hangs(HANG_S)
    assert sum(pauses) == pytest.approx(30)


class Nccl:
    """As torch looks at its pipe and writes its file, for rank 0."""

    def __init__(self, directory: Path, writes: bool = True) -> None:
        self.prefix = f"{directory}/nccl-"
        os.mkfifo(f"{self.prefix}0.pipe")
        self._pipe = os.open(f"{self.prefix}0.pipe", os.O_RDONLY | os.O_NONBLOCK)
        self._writes = writes
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        """Time passes: in the first pause it begins to write, in the second it ends."""
        self.pauses.append(seconds)
        asked = len(self.pauses) > 1 or os.read(self._pipe, 8) == b"1"
        if asked and self._writes and len(self.pauses) <= 2:
            with Path(f"{self.prefix}0").open("ab") as file:
                file.write(b"half")

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[Nccl]:
    fake = Nccl(tmp_path)
    yield fake
    fake.close()


class SaysWhenKilled(RankStacks):
    found: list[bytes | None]
    recorder: FlightRecorder

    def kill(self) -> None:
        self.found.append(self.recorder.read())
        super().kill()


def test_a_rank_that_hangs_is_killed_when_nccl_has_written_down_what_it_did(nccl: Nccl) -> None:
    recorder = FlightRecorder(nccl.prefix, 0)
    with rank(OWN_CODE, seen_as=SaysWhenKilled) as (process, stacks):
        assert isinstance(stacks, SaysWhenKilled)
        stacks.found, stacks.recorder = [], recorder

        def pause(seconds: float) -> None:
            if stacks.found:
                process.wait(5)
            nccl.pause(seconds)

        watch = watched(0, stacks, lambda _: None, pause, recorder)
        with pytest.raises(RankError):
            watch.end_if_it_hangs(HANG_S)
    assert stacks.found == [b"halfhalf"]


def test_an_nccl_that_writes_nothing_down_is_not_waited_for_long(tmp_path: Path) -> None:
    fake = Nccl(tmp_path, writes=False)
    recorder = FlightRecorder(fake.prefix, 0)
    recorder.wait(fake.pause)
    assert sum(fake.pauses) == pytest.approx(5)
    assert recorder.read() is None
    fake.close()


def test_nobody_is_asked_where_no_nccl_is_there_or_none_that_looks(nccl: Nccl) -> None:
    assert FlightRecorder(nccl.prefix, 0).ask()
    assert not FlightRecorder(nccl.prefix, 1).ask()
    nccl.close()
    assert not FlightRecorder(nccl.prefix, 0).ask()
    nccl._pipe = os.open(os.devnull, os.O_RDONLY)


class LeavesOneBehind(RankStacks):
    """As a rank whose script is still there when it has gone itself."""

    def has_ended(self) -> bool:
        return False


def test_of_what_a_process_had_started_and_does_not_end_that_is_said() -> None:
    with rank(OWN_CODE, seen_as=LeavesOneBehind) as (process, stacks):

        def pause(_: float) -> None:
            process.wait(5)  # no time passes for what it has started

        with pytest.raises(RankError, match="30 s after it was killed what it had started had not ended"):
            watched(0, stacks, lambda _: None, pause).end_if_it_hangs(HANG_S)


SESSION = """
import os, subprocess
from train_jobs.watch.rank_stacks import write_stacks_when_asked
os.setsid()
print(write_stacks_when_asked(), subprocess.Popen(["sleep", "600"], stdout=2).pid, flush=True)
os.read(0, 1)
"""


def test_a_process_has_ended_when_all_that_it_had_started_has() -> None:
    command = [sys.executable, "-c", SESSION]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        descriptor, child = map(int, process.stdout.readline().split())
        stacks = RankStacks(process.pid, descriptor)
        stacks.kill()
        while not stacks.is_dead():
            pass
        assert not stacks.has_ended()
        os.kill(child, signal.SIGKILL)
        while not stacks.has_ended():
            pass


def test_who_watches_knows_that_a_rank_saves() -> None:
    watch = RankWatch(0, HANG_S, lambda _: None, 0.0)
    assert not watch.saves, "it has said nothing yet"
    told = []
    for phase, saves in (("starting", False), ("waiting", True), ("saving", True), (None, False)):
        watch.heard(Activity(1, phase, 10.0, saves=saves), 1.0)
        told.append(watch.saves)
    assert told == [False, True, True, False]
