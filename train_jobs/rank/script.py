"""Task `script`: an unchanged torchrun script, one process a rank, in the environment of torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.config.sections.train import TrainJobConfig
from train_jobs.errors import ScriptError, last_exception
from train_jobs.watch.rank_stacks import main_frames

STOP_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL for a script that is asked to stop, and does not save."""
THREADS = "OMP_NUM_THREADS"
"""The variable that torch takes the number of its threads from; torchrun leaves one that is exported."""
_POLL_S = 0.2
_ASK_S = 2.0
_TAIL_BYTES = 4000
_MOST_READ = 1 << 20
_MOST_STACKS = 200_000
_ABORT_S = 10.0
_DUMP = "Fatal Python error: "
_VARIABLE = re.compile(r"\$(?:\{(SHOAL_\w+)\}|(SHOAL_\w+))")

# The script has to go with its worker, whatever ends that: the kernel kills it. `exec` keeps the setting, and
# leaves the script a process like any other.
_LAUNCH = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execv(sys.executable, [sys.executable, '-u', *sys.argv[2:]])"
)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands, in torchrun's terms."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


def torchrun_environment(
    place: RankPlace,
    master: tuple[str, int],
    job: str,
    attempt: int,
    threads: int | None,
    max_restarts: int = 0,
) -> dict[str, str]:
    """What torchrun sets for a rank (torch.distributed.run, "Environment Variables").

    Args:
        master: address and port of the store of the group, which listens already (as torchrun's agent's does:
            a port that a script had to take for itself could be gone by then).
        attempt: counts from 1 over the life of the job.
        threads: CPUs of the rank; None where the job's own `env` says how many.
        max_restarts: attempts beyond the first, as far as their number is known.
    """
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **({} if threads is None else {THREADS: str(max(1, threads))}),
    }


class ScriptProcess:
    """One rank of a script.

    Python's fault handler is on in it, unless the job's `env` says otherwise: a crash leaves the stacks of
    all threads in its log, and so does `abort`.

    Args:
        environment: what is added to this process's own.
        log: where its output goes; the directory is made.
        directory: where the job's files are.
    """

    def __init__(
        self, config: TrainJobConfig, environment: Mapping[str, str], log: Path, directory: Path
    ) -> None:
        self.log = log
        self._save_timeout_s = config.recovery.save_timeout_s
        self._read = 0
        self._armed = [False, False]
        """Whether SIGABRT would have left stacks in the log, at the last looks."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), *command_of(config, environment)],
                cwd=directory / (config.cwd or ""),
                env={"PYTHONFAULTHANDLER": "1", **os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(
        self,
        stop_asked: Callable[[], bool],
        look: Callable[[], None] = lambda: None,
        is_saving: Callable[[], bool] = lambda: False,
    ) -> str:
        """Wait for the end: "finished", or "stopped" where that was asked for.

        Args:
            look: called again and again while it runs, and once when it has ended; what it raises goes on.
            is_saving: whether it saves, asked again and again once it is to stop: then it may take longer.

        Raises:
            ScriptError: it ended with another exit code than 0; the message has the end of its output.
        """
        asked_at: float | None = None
        next_look = time.monotonic() + _ASK_S
        while (code := self._poll(_POLL_S)) is None:
            look()
            now = time.monotonic()
            if asked_at is None and now >= next_look:
                next_look = now + _ASK_S
                if stop_asked():
                    asked_at = now
                    self._process.terminate()
            if asked_at is not None:
                limit_s = self._save_timeout_s if is_saving() else STOP_GRACE_S
                if now - asked_at > limit_s:
                    self._process.kill()
        look()
        if asked_at is not None:
            return "stopped"
        if code in (-signal.SIGABRT, -signal.SIGSEGV) and self._had_ended():
            with self.log.open("a") as log:
                log.write(f"\n[shoal] {how_it_ended(code)}, after its last line of Python: it has finished\n")
            return "finished"
        if code:
            raise ScriptError(how_it_ended(code), self.tail())
        return "finished"

    def new_output(self) -> str:
        """What it has printed since this was last asked."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            data = file.read(_MOST_READ)
        self._read += len(data)
        return data.decode(errors="replace")

    def abort(self) -> str:
        """End one that hangs; returns where its threads stood, as far as it could still say."""
        before = self.log.stat().st_size
        self._process.send_signal(signal.SIGABRT)
        if self._poll(_ABORT_S) is None:
            self.kill()
        with self.log.open("rb") as file:
            file.seek(before)
            return file.read(_MOST_STACKS).decode(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def tail(self) -> str:
        """The end of what it has printed."""
        return self._last(_TAIL_BYTES)

    def _last(self, count: int) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - count))
            return file.read().decode(errors="replace")

    def _poll(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._armed = [self._armed[1], _leaves_stacks(self._process.pid, self.log)]
            return None

    def _had_ended(self) -> bool:
        """Whether a crash came when the program was over: in the destructors of what it had loaded.

        The fault handler then finds nothing of the program in the main thread, or is off already.
        """
        output = self._last(_MOST_STACKS)  # all of a dump, however many threads and modules there are
        if last_exception(output) is not None:
            return False
        _, dump, stacks = output.rpartition(_DUMP)
        if not dump:
            return any(self._armed)
        if "\n...\n" in stacks:  # more threads than it writes down: the main one is not there
            return False
        return [function for _, function in main_frames(stacks)][-1:] in ([], ["__del__"])


def command_of(config: TrainJobConfig, environment: Mapping[str, str]) -> list[str]:
    """The words after `python -u`."""
    arguments = [expanded(each, environment) for each in config.arguments]
    if config.module is not None:
        return ["-m", config.module, *arguments]
    assert config.script is not None, "the config was checked"
    return [os.path.relpath(config.script, config.cwd or ".") if config.cwd else config.script, *arguments]


def _leaves_stacks(pid: int, log: Path) -> bool:
    """Whether a process has a handler for SIGABRT, and its standard error is this file."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGABRT - 1) & 1) and os.path.samefile(f"/proc/{pid}/fd/2", log)
    except (OSError, StopIteration):
        return False


def expanded(argument: str, environment: Mapping[str, str]) -> str:
    """An argument with the values of the variables in it: `$SHOAL_CHECKPOINT_DIR`, `${SHOAL_WORK_DIR}`."""
    return _VARIABLE.sub(lambda found: environment.get(found[1] or found[2], found[0]), argument)


def how_it_ended(code: int) -> str:
    """In words: an exit code, or minus a signal."""
    if code < 0:
        return f"the script was ended by {signal.Signals(-code).name}"
    return f"the script ended with exit code {code}"
