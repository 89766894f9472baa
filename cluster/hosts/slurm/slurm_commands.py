"""Slurm's own commands: sbatch, squeue, scontrol, scancel, srun."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.errors import RequestError, ShoalError

Answer = TypeVar("Answer")

ANSWER_S = 60.0
SILENT_S = 120.0
AGAIN_S = 2.0
_FORMAT = "%T|%r|%S|%N"
"""Of squeue: state, reason, expected start, nodes."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "RESIZING")


@dataclass(frozen=True)
class QueueEntry:
    """A job as the queue shows it.

    Attributes:
        state: as squeue writes it (PENDING, RUNNING, COMPLETING, …).
        reason: why it waits, in Slurm's word.
        start: when it may start, as Slurm guesses; empty where it does not.
        nodes: as Slurm writes them (`gpu-[1-3]`).
    """

    state: str
    reason: str
    start: str
    nodes: str

    @property
    def waits(self) -> bool:
        return self.state in WAITING


def submit(script: str, directory: str) -> str:
    """Put a job into the queue; its number.

    Args:
        script: what sbatch is given.
        directory: in which it runs.

    Raises:
        RequestError: Slurm refuses it.
    """
    printed = _run(["sbatch", "--parsable", f"--chdir={directory}"], script)
    return printed.strip().partition(";")[0]


def in_queue(job: str) -> QueueEntry | None:
    """How a job stands; None where it has ended, or Slurm has forgotten it.

    Raises:
        ShoalError: Slurm does not answer.
    """
    try:
        printed = _run(["squeue", "--noheader", f"--jobs={job}", f"--format={_FORMAT}"])
    except RequestError as error:
        if "Invalid job id" in str(error):
            return None
        raise ShoalError(str(error)) from error
    if not printed.strip():
        return None
    state, reason, start, nodes = printed.strip().splitlines()[0].split("|", 3)
    return QueueEntry(state, reason, "" if start == "N/A" else start, nodes)


def cancel(job: str) -> None:
    """Take a job out of the queue, or end it, or a step of it (JOB.STEP)."""
    _run(["scancel", job])


def tell_to_leave(job: str) -> None:
    """Send the notice that Slurm sends before the time limit: SIGTERM to the script alone."""
    _run(["scancel", "--batch", "--signal=TERM", job])


def requeue(job: str) -> None:
    """Put a job that runs back into the queue."""
    _run(["scontrol", "requeue", job])


def insist(ask: Callable[[], Answer], for_s: float = SILENT_S) -> Answer:
    """What one of these functions answers, called again while Slurm's controller is away: it may be restarted
    at the very moment at which a job has to ask.

    Raises:
        ShoalError: it has been away for so long.
    """
    deadline, pause = time.monotonic() + for_s, threading.Event()
    while True:
        try:
            return ask()
        except ShoalError:
            if time.monotonic() >= deadline:
                raise
        pause.wait(AGAIN_S)


def hosts_of(nodes: str) -> list[str]:
    """The hosts of a list as Slurm writes it (`gpu-[1-3]`), in its order."""
    return _run(["scontrol", "show", "hostnames", nodes]).split() if nodes else []


def step(program: Sequence[str], *, node: str, job: str | None = None, terminal: bool = False) -> list[str]:
    """The command that runs a program on a node of a job.

    Args:
        job: its number; None within the job.
    """
    return [
        "srun",
        *([] if job is None else [f"--jobid={job}"]),
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--nodelist={node}",
        *(["--pty"] if terminal else []),
        # Beside what runs there: a node is asked while Ray has all of it.
        "--overlap",
        "--mpi=none",
        *program,
    ]


def outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what Slurm says to the processes of one job: srun would take it for itself."""
    return {
        key: value
        for key, value in environment.items()
        if not key.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")) or key == "SLURM_CONF"
    }


def _run(command: Sequence[str], given: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
            env=outside_of_jobs(os.environ),
        )
    except FileNotFoundError as error:
        raise ShoalError(
            f"there is no `{command[0]}` here: `provider: slurm` needs Slurm's commands, as a login node has"
            " them"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ShoalError(f"Slurm's `{command[0]}` did not answer within {ANSWER_S:.0f} s") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise RequestError(f"`{command[0]}`: {said}")
    return done.stdout
