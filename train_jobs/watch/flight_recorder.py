"""NCCL's flight recorder: the last operations of a rank, which it writes down before it is killed.

torch writes them by itself where an operation of NCCL runs into its timeout; a hang is found earlier, and the
rank killed. Until then it is asked through a pipe at which torch looks once a second
(TORCH_NCCL_DEBUG_INFO_PIPE_FILE, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_DUMP_S = 5.0
_LOOK_S = 0.1


class FlightRecorder:
    """That of one rank, for a process of its node.

    Args:
        prefix: of the recorder's files, as its rank has it (train_jobs.parallel.rendezvous.record_flights).
        rank: global rank.
    """

    def __init__(self, prefix: str, rank: int) -> None:
        self._pipe = Path(f"{prefix}{rank}.pipe")
        self._file = Path(f"{prefix}{rank}")

    def ask(self) -> bool:
        """Have the rank write; whether there is somebody who looks at the pipe. Never waits."""
        with suppress(OSError):
            descriptor = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)  # an error where nobody reads
            try:
                return os.write(descriptor, b"1") > 0
            finally:
                os.close(descriptor)
        return False

    def wait(self, pause: Callable[[float], None] = time.sleep) -> None:
        """Wait for what was asked for, a few seconds at most: it may hang too.

        Args:
            pause: waits for so many seconds.
        """
        before = 0
        for _ in range(round(_DUMP_S / _LOOK_S)):
            size = self._size()
            if 0 < size == before:  # nothing more comes
                return
            before = size
            pause(_LOOK_S)

    def read(self) -> bytes | None:
        """What the rank has written, for `torchfrtrace`; None where it has not."""
        return self._file.read_bytes() if self._size() else None

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except OSError:
            return 0
