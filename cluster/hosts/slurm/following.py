"""Waiting for a batch job: what it says, how it stands in the queue, and what that means."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import RequestError, ShoalError
from cluster.hosts.provider import Tell
from cluster.hosts.slurm import slurm_commands as slurm
from cluster.hosts.slurm.batch_job import BatchJob, Phase, read_batch_job

LOOK_S = 0.5
ASK_S = (1.0, 15.0)
"""Between two questions to Slurm, at first and at most: its controller answers everybody."""
QUIET_S = 60.0
"""A job that runs for so long and has said nothing is not seen from here."""
HEADLESS_S = 120.0
"""After so long without its first node a job is not put back into the queue by the nodes that are left of it,
which do so after half of that: nothing of the cluster lives on them either."""

_REASONS = {
    "Priority": "others come first",
    "Resources": "nodes are in use",
    "BeginTime": "its time has not come",
    "Dependency": "it waits for another job",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "JobHeldAdmin": "the site holds it",
    "ReqNodeNotAvail": "nodes that it needs are down, or reserved",
    "PartitionDown": "its partition is down",
    "PartitionConfig": "no nodes of its partition have what it asks for: as it is it will not start",
    "PartitionNodeLimit": "its partition gives no job so many nodes: as it is it will not start",
    "PartitionTimeLimit": "its partition gives no job so much time: as it is it will not start",
    "BadConstraints": "no nodes have what it asks for: as it is it will not start",
    "AccountNotAllowed": "its partition does not take this account: as it is it will not start",
}
"""What Slurm's words for why a job waits mean."""


def how_it_stands(name: str) -> str | None:
    """How the batch job of a cluster that is not up stands, and what to do; None where it has none."""
    job = read_batch_job(name)
    if job is None:
        return None
    entry = slurm.in_queue(job.number) if job.number else None
    if entry is None:
        return f"{job.words} has ended; `shoal up` submits another"
    if entry.waits:
        return f"{_waiting(job, entry)}. `shoal up` follows it"
    return f"{job.words} is {job.phase().name} on {entry.nodes}. `shoal up` follows it"


def _waiting(job: BatchJob, entry: slurm.QueueEntry) -> str:
    words = f"{job.words} waits in the queue"
    if entry.reason not in ("", "None"):
        # Some come with a list of nodes.
        meaning = _REASONS.get(entry.reason.partition(",")[0])
        words += f": {entry.reason}" + ("" if meaning is None else f" ({meaning})")
    return words + (f"; it may start at {entry.start}" if entry.start else "")


class Following:
    """Somebody who waits for a batch job, and is told what it says.

    Args:
        passed: what it has said before is not told.
    """

    def __init__(self, job: BatchJob, tell: Tell, *, passed: bool = False) -> None:
        self._job, self._tell = job, tell
        self._seen = len(job.told()) if passed else 0
        self._pause = threading.Event()

    def until_up(self) -> Phase:
        """Wait until the cluster is up.

        Raises:
            ShoalError: the job has ended before.
        """
        waits_for, runs_since, headless_since = "", None, None
        for phase, entry in self._looks():
            if phase.name == "up" and entry is not None and entry.state == "RUNNING":
                if phase.facts["head"] in slurm.hosts_of(entry.nodes):
                    return phase
                headless_since = headless_since or time.monotonic()
                if time.monotonic() - headless_since > HEADLESS_S:
                    self._give_back(phase, entry)
                    headless_since = None
                continue
            if phase.name == "failed":
                raise ShoalError(phase.said)
            if entry is None:
                raise ShoalError(
                    f"{self._job.words} has ended before the cluster was up; it said last:\n"
                    f"{self._job.log_tail()}"
                )
            if entry.waits:
                runs_since = None
                words = _waiting(self._job, entry)
                if words != waits_for:
                    self._tell(words)
                waits_for = words
            elif phase.name == "waiting":
                runs_since = runs_since or time.monotonic()
                if time.monotonic() - runs_since > QUIET_S:
                    raise ShoalError(
                        f"{self._job.words} runs on {entry.nodes}, and nothing is seen here of what it writes"
                        f" in {self._job.directory}: XDG_STATE_HOME has to be a directory that this machine"
                        " and all nodes share"
                    )
        raise AssertionError("it looks until one of these holds")

    def _give_back(self, phase: Phase, entry: slurm.QueueEntry) -> None:
        """Put a job back into the queue of which no process is left: Slurm lets it run on without the node
        that it has lost (`--no-kill`), until its time limit."""
        head = phase.facts["head"]
        self._tell(f"{self._job.words} has lost {head}, its head, and nothing runs on {entry.nodes}")
        if ClusterConfig.model_validate(self._job.section).slurm.requeue:
            with suppress(RequestError):  # somebody else was faster
                slurm.requeue(self._job.number)
        else:
            slurm.cancel(self._job.number)

    def until_gone(self, timeout_s: float) -> bool:
        """Wait until it is out of the queue; whether it is in time."""
        deadline = time.monotonic() + timeout_s
        for _, entry in self._looks():
            if entry is None:
                return True
            if time.monotonic() > deadline:
                return False
        raise AssertionError("it looks until one of these holds")

    def _looks(self) -> Iterator[tuple[Phase, slurm.QueueEntry | None]]:
        """(how far it is, how it stands in the queue), again and again."""
        wait, asked_at = ASK_S[0], 0.0
        entry = None
        while True:
            now = time.monotonic()
            if not asked_at or now - asked_at >= wait:
                entry, asked_at = slurm.in_queue(self._job.number), now
                wait = min(wait * 1.3, ASK_S[1])
            phase = self._job.phase()
            told = self._job.told()
            if len(told) < self._seen:  # it starts again
                self._seen = 0
            for text in told[self._seen :]:
                self._tell(text)
                wait = ASK_S[0]  # it moves
            self._seen = len(told)
            yield phase, entry
            self._pause.wait(LOOK_S)
