"""The faults do to files, memory, file systems and clocks what they say; nothing is left of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infra.lab.faults import clock, disks, memory
from infra.lab.faults.files import DAMAGES


@pytest.mark.parametrize("how", sorted(DAMAGES))
def test_a_damaged_checkpoint_is_another_than_what_was_written(how: str, tmp_path: Path) -> None:
    directory = tmp_path / "step-00000025"
    directory.mkdir()
    (directory / "small").write_bytes(b"x")
    (directory / "large").write_bytes(bytes(1000))
    DAMAGES[how](directory)
    if how == "deleted":
        assert not directory.exists()
        return
    assert (directory / "small").read_bytes() == b"x"
    left = (directory / "large").read_bytes()
    assert len(left) == (500 if how == "truncated" else 1000)
    assert sum(left) == (0 if how == "truncated" else 1)


@pytest.mark.skipif(disks.missing() is not None, reason=str(disks.missing()))
def test_a_disk_fills_up_refuses_writes_and_goes_away(tmp_path: Path) -> None:
    with disks.disk(tmp_path / "disk") as disk:
        kept = disk.directory / "kept"
        kept.write_text("before")
        disk.fill()
        with pytest.raises(OSError, match="No space") as full:
            (disk.directory / "more").write_bytes(bytes(4096))
        assert full.value.errno == errno.ENOSPC
        disk.empty()
        disk.fill(leave_bytes=100_000)
        assert 90_000 < disk.free_bytes <= 104_096
        disk.empty()
        disk.refuse_writes()
        with pytest.raises(OSError, match="Read-only"):
            (disk.directory / "new").touch()
        disk.take_writes()
        disk.take_away()
        assert not kept.exists()
        with pytest.raises(OSError, match="Read-only"):
            (disk.directory / "new").touch()
        disk.bring_back()
        assert kept.read_text() == "before"
    assert not (tmp_path / "disk").exists()


@pytest.mark.skipif(memory.missing() is not None, reason=str(memory.missing()))
def test_the_kernel_kills_what_takes_more_memory_than_its_limit() -> None:
    program = (
        "import sys\nsys.stdin.readline()\nwhile True: kept = [bytearray(b'x' * 2**24) for _ in range(999)]"
    )
    with memory.limited() as limit, subprocess.Popen([sys.executable, "-c", program], stdin=-1) as process:
        limit.put(psutil.Process(process.pid))
        process.communicate(b"\n", timeout=60)
        assert process.returncode == -signal.SIGKILL
    assert not limit.directory.exists()


@pytest.mark.skipif(clock.missing() is not None, reason=str(clock.missing()))
def test_the_wall_clock_of_what_is_started_jumps_and_its_monotonic_clock_does_not(tmp_path: Path) -> None:
    program = (
        "import sys, threading, time\n"
        "for line in sys.stdin:\n"
        "    before = time.monotonic()\n"
        "    threading.Event().wait(0.01)\n"
        "    print(time.time(), time.monotonic(), time.monotonic() - before, flush=True)\n"
    )
    with clock.movable_clock(tmp_path) as wall:
        asked = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True)
        assert asked.stdin is not None
        assert asked.stdout is not None
        for ahead in (0, 3600, -3600):
            wall.jump(ahead)
            asked.stdin.write("\n")
            asked.stdin.flush()
            its_time, its_monotonic, waited = map(float, asked.stdout.readline().split())
            assert its_time - time.time() == pytest.approx(ahead, abs=30)
            assert abs(its_monotonic - time.monotonic()) < 30
            assert waited < 30, "waits do not go by the wall clock"
        asked.communicate(timeout=30)
    assert "SHOAL_WALL_CLOCK" not in os.environ
