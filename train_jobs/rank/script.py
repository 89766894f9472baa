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
from train_jobs.errors import ScriptError

STOP_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL for a script that is asked to stop."""
_POLL_S = 0.2
_ASK_S = 2.0
_TAIL_BYTES = 4000
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
    place: RankPlace, master: tuple[str, int], job: str, attempt: int, threads: int
) -> dict[str, str]:
    """What torchrun sets for a rank (torch.distributed.run, "Environment Variables").

    Args:
        master: address and port of the store of the group, which listens already (as torchrun's agent's does:
            a port that a script had to take for itself could be gone by then).
        attempt: counts from 1 over the life of the job.
        threads: CPUs of the rank.
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
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(max(1, threads)),
    }


class ScriptProcess:
    """One rank of a script.

    Args:
        environment: what is added to this process's own.
        log: where its output goes; the directory is made.
        directory: where it runs.
    """

    def __init__(
        self, config: TrainJobConfig, environment: Mapping[str, str], log: Path, directory: Path
    ) -> None:
        assert config.script is not None
        arguments = [expanded(each, environment) for each in config.arguments]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), config.script, *arguments],
                cwd=directory,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self, stop_asked: Callable[[], bool]) -> str:
        """Wait for the end: "finished", or "stopped" where that was asked for.

        Raises:
            ScriptError: it ended with another exit code than 0; the message has the end of its output.
        """
        asked_at: float | None = None
        next_look = time.monotonic() + _ASK_S
        while (code := self._poll()) is None:
            now = time.monotonic()
            if asked_at is None and now >= next_look:
                next_look = now + _ASK_S
                if stop_asked():
                    asked_at = now
                    self._process.terminate()
            if asked_at is not None and now - asked_at > STOP_GRACE_S:
                self._process.kill()
        if asked_at is not None:
            return "stopped"
        if code:
            raise ScriptError(_how_it_ended(code), self._tail())
        return "finished"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _poll(self) -> int | None:
        try:
            return self._process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            return None

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")


def expanded(argument: str, environment: Mapping[str, str]) -> str:
    """An argument with the values of the variables in it: `$SHOAL_CHECKPOINT_DIR`, `${SHOAL_WORK_DIR}`."""
    return _VARIABLE.sub(lambda found: environment.get(found[1] or found[2], found[0]), argument)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the script was ended by {signal.Signals(-code).name}"
    return f"the script ended with exit code {code}"
