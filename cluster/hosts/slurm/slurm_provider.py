"""The provider of nodes of a batch job: submitted and followed from here; its first node does the rest."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config.sections.cluster import ClusterConfig
from cluster.environment import passed_on
from cluster.errors import ShoalError
from cluster.hosts.on_host.result_line import RESULT
from cluster.hosts.provider import RemoteStarted, Tell, require_own_file, require_same_file, waiting_for
from cluster.hosts.slurm import slurm_commands as slurm
from cluster.hosts.slurm.batch_job import BatchJob, Phase, read_batch_job
from cluster.hosts.slurm.batch_script import batch_script, python_of
from cluster.hosts.slurm.following import Following
from cluster.state.record import read_record, token_of
from cluster.state.state_directory import locked, remove_state

LEAVE_S = 400.0
"""Longest that jobs and apps may take to leave."""
GONE_S = 90.0
"""Longest that Slurm may take to end the job then."""


class SlurmProvider:
    """Nodes of a batch job; see RemoteProvider. An interrupted `up` leaves the job in the queue.

    Args:
        shoal: what runs the command `shoal` with the Python of a node.
    """

    def __init__(self, shoal: Sequence[str]) -> None:
        self._shoal = tuple(shoal)

    def up(
        self,
        cluster: ClusterConfig,
        config_path: Path,
        tell: Tell,
        command: Sequence[str],
        *,
        stay: bool = True,
    ) -> RemoteStarted:
        config_path = config_path.absolute()
        with locked(cluster.name, lambda: tell(waiting_for(cluster.name))):
            job, was_up = self._submitted(cluster, config_path, tell)
        # It may wait for days, in which another command may want its end.
        try:
            phase = Following(job, tell).until_up()
        except KeyboardInterrupt:
            tell(f"{job.words} stays in the queue: `shoal up` follows it again, `shoal down` cancels it")
            raise
        except ShoalError:
            with locked(cluster.name):
                if read_batch_job(cluster.name) == job:
                    remove_state(cluster.name)
            raise
        try:
            document = self._on_head(job, phase, command, tell, was_up=was_up)
        finally:
            if not stay:
                with locked(cluster.name):
                    self._end(job, tell)
        return RemoteStarted(read_record(cluster.name) if stay else None, was_up, document)

    def down(self, name: str, tell: Tell, command: Sequence[str], config_path: Path | None = None) -> bool:
        with locked(name, lambda: tell(waiting_for(name))):
            job = read_batch_job(name)
            if job is None:
                return False
            require_own_file(name, job.config_path, config_path)
            self._end(job, tell)
            return True

    def _submitted(self, cluster: ClusterConfig, config_path: Path, tell: Tell) -> tuple[BatchJob, bool]:
        """The cluster's job, and whether it was up: the one that is in the queue, else a new one.

        Raises:
            RequestError: another file has a cluster of this name; Slurm refuses it.
        """
        before = read_batch_job(cluster.name)
        if before is not None:
            require_same_file(cluster.name, before.config_path, config_path)
        section = cluster.model_dump(mode="json", exclude_unset=True)
        if before is not None and before.number and slurm.in_queue(before.number) is not None:
            if before.section != section:
                tell("the cluster section of the config has changed; `shoal down` and `shoal up` apply it")
            return before, before.phase().name == "up"
        if before is not None:
            tell(f"{before.words} has ended; another one is submitted")
        passed_on(cluster.env, os.environ, "cluster.env")  # what is missing is told before Slurm is asked
        remove_state(cluster.name)
        job = BatchJob(cluster.name, str(uuid.uuid4()), str(config_path), section)
        job.write()
        token_of(job.name)
        try:
            number = slurm.submit(batch_script(cluster, config_path), os.path.dirname(config_path))
        except BaseException:
            remove_state(cluster.name)
            raise
        job = job.numbered(number)
        job.write()
        tell(f"submitted: {job.words}")
        return job, False

    def _on_head(
        self, job: BatchJob, phase: Phase, command: Sequence[str], tell: Tell, *, was_up: bool
    ) -> dict[str, Any]:
        """Run a command of `shoal` on the head, unless the job has a moment ago; the document it prints.

        Raises:
            ShoalError: it failed.
        """
        if not was_up and phase.facts["command"] == [*self._shoal, *command]:
            done_by_itself: dict[str, Any] = phase.facts["document"]
            return done_by_itself
        head, config = phase.facts["head"], phase.facts["config"]
        program = [*node_program(job), "run", job.name, *self._shoal, *command, "-f", config]
        done = subprocess.Popen(
            slurm.step(program, job=job.number, node=head),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=slurm.outside_of_jobs(os.environ),
        )
        said: list[str] = []

        def listen() -> None:
            assert done.stderr is not None, "it is piped"
            for line in done.stderr:
                said.append(line.rstrip())
                tell(said[-1])

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        assert done.stdout is not None, "it is piped"
        printed = done.stdout.read()
        code = done.wait()
        listener.join()
        if code != 0:
            raise ShoalError(said[-1] if said else f"`shoal {' '.join(command)}` failed on {head}")
        document: dict[str, Any] = json.loads(printed)
        return document

    def _end(self, job: BatchJob, tell: Tell) -> None:
        """End the job, after those who use the cluster have left, and forget it."""
        entry = slurm.in_queue(job.number) if job.number else None
        if entry is not None:
            job.want_end()
            if entry.state == "RUNNING" and job.phase().name in ("starting", "up", "leaving"):
                slurm.tell_to_leave(job.number)
                if not Following(job, tell, passed=True).until_gone(LEAVE_S):
                    tell(f"{job.words} does not leave; it is ended")
            if slurm.in_queue(job.number) is not None:
                slurm.cancel(job.number)
                if not Following(job, tell, passed=True).until_gone(GONE_S):
                    tell(f"{job.words} is still in the queue, and Slurm will end it")
        remove_state(job.name)


def node_program(job: BatchJob) -> list[str]:
    """What asks a node of the job about its own part, before the arguments; see `on_host.node`."""
    return [python_of(ClusterConfig.model_validate(job.section)), "-m", "cluster.hosts.on_host.node"]


def ask_node(job: BatchJob, node: str, what: str, document: Mapping[str, Any]) -> Any:
    """Have a node of the job that runs do something with its part of the cluster; see `on_host.node`.

    Raises:
        ShoalError: Slurm does not reach it, or it fails there.
    """
    done = subprocess.run(
        slurm.step([*node_program(job), what], job=job.number, node=node),
        input=json.dumps(document),
        capture_output=True,
        text=True,
        env=slurm.outside_of_jobs(os.environ),
        timeout=slurm.ANSWER_S,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    said = [line for line in done.stderr.splitlines() if line.strip()]
    raise ShoalError(f"{node}: {said[0] if said else 'no answer came'}")
