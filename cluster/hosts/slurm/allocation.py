"""A batch job's first node: brings the cluster up over all of its nodes, and ends it when Slurm says so.

    the queue -> starting -> up -> leaving -> ended, or back in the queue

Its nodes are steps of the job (srun), the head's on this host. SIGTERM is the notice to leave: it comes
before the time limit, at a preemption, and when somebody requeues or cancels the job. When the grace time of
a preemption begins, Slurm sends it to the steps alone, which pass it on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cluster.config.sections.cluster import ClusterConfig
from cluster.environment import passed_on
from cluster.errors import ShoalError
from cluster.hosts.on_host.head_config import section_on_head
from cluster.hosts.on_host.node import environment_of
from cluster.hosts.on_host.node_start import CONFIG_FILE, STATE
from cluster.hosts.slurm import slurm_commands as slurm
from cluster.hosts.slurm.batch_job import BatchJob
from cluster.hosts.slurm.node_step import SILENT_S, NodeStep
from cluster.state.record import RECORD_FILE, TOKEN_FILE, ClusterRecord, made_of
from cluster.state.state_directory import write_private

NODE_PROGRAM = ("-m", "cluster.hosts.slurm.allocation_node")
NODES_S = 120.0
"""So long the cluster waits for all of its nodes; one that comes later is used too."""
END_S = 30.0
AGAIN_S = 10.0
"""After so long a node whose step has ended is tried again."""
LOOK_S = 0.2


class Allocation:
    """What the first node does.

    Args:
        job: the batch job, numbered.
        up: runs on the head once its nodes are there, prints a JSON document, and leaves the cluster up.
        leave: what is run on the head before the nodes end.
        come_back: what is run there after `up`: what was left goes on.
    """

    def __init__(
        self,
        job: BatchJob,
        *,
        up: Sequence[str],
        leave: Sequence[str],
        come_back: Sequence[str],
    ) -> None:
        self._job = job
        self._cluster = ClusterConfig.model_validate(job.section)
        self._up, self._leave, self._come_back = up, leave, come_back
        self._notice = threading.Event()
        self._host = os.environ["SLURMD_NODENAME"]
        self._head = self._step(self._host)
        self._others: dict[str, NodeStep] = {}
        """By host."""
        self._ended_at: dict[str, float] = {}
        self._gcs_address = ""
        self._directory = Path()
        """The head's node's, on this host."""

    def run(self) -> int:
        """All of it; the exit code of the job."""
        signal.signal(signal.SIGTERM, lambda *_: self._notice.set())
        job = self._job
        job.begin()
        try:
            self._start()
            if not self._notice.is_set():
                self._serve()
        except ShoalError as error:
            job.withdraw()
            self._end_steps()
            job.enter("failed", str(error))
            print(error, flush=True)
            return error.exit_code
        return self._go()

    # -- its beginning ----------------------------------------------------------------------------------

    def _start(self) -> None:
        job = self._job
        self._tell(f"starting Ray on {self._host}")
        self._head.start()
        self._until(lambda: self._head.is_settled)
        if self._notice.is_set():
            return
        if not self._head.is_up:
            said = self._head.last.get("said") or job.log_tail()
            raise ShoalError(f"Ray did not start on {self._host}; it said last:\n{said}")
        told = self._head.last["told"]
        self._directory = Path(told["directory"])
        self._gcs_address = told["gcs_address"]
        self._start_others()
        env = passed_on(self._cluster.env, os.environ, "cluster.env")
        section = section_on_head(self._cluster, told["gcs_address"], told["servers"], env)
        for key in ("api", "gateway"):
            if section[key].get("host") is None and (key == "api" or self._cluster.gateway.keys is not None):
                section[key]["host"] = told["gcs_address"].rpartition(":")[0]
        write_private(self._directory / CONFIG_FILE, json.dumps({"cluster": section}, indent=2))

    def _start_others(self) -> None:
        hosts = slurm.hosts_of(os.environ["SLURM_JOB_NODELIST"])
        others = [host for host in hosts if host != self._host]
        if not others:
            return
        self._tell(f"starting Ray on the other nodes of {os.environ['SLURM_JOB_NODELIST']}")
        for host in others:
            self._others[host] = self._step(host, self._gcs_address)
            self._others[host].start()
        deadline = time.monotonic() + NODES_S

        def settled() -> bool:
            return all(step.is_settled for step in self._others.values())

        self._until(lambda: settled() or time.monotonic() > deadline)
        missing = [host for host, step in self._others.items() if not step.is_up]
        if missing and not self._notice.is_set():
            self._tell(f"{', '.join(missing)} did not come up; the cluster does without")

    def _serve(self) -> None:
        """Be up until there is notice, or the head is lost.

        Raises:
            ShoalError: the cluster does not come up; the head was lost.
        """
        job = self._job
        printed = self._run_on_head(self._up)
        if self._notice.is_set():
            return
        job.publish(self._record())
        job.enter(
            "up",
            head=self._host,
            config=str(self._directory / CONFIG_FILE),
            command=list(self._up),
            document=json.loads(printed),
        )
        if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            try:
                self._run_on_head(self._come_back)
            except ShoalError as error:
                self._tell(f"what ran before could not all go on: {error}")
        while not self._head.is_over and not self._notice.wait(LOOK_S):
            self._keep_others()
        if not self._notice.is_set():
            self._tell("the head has ended by itself; everything is started anew")

    def _keep_others(self) -> None:
        """Start again what has ended on a node that the job still has: it lost its power, and is back."""
        now = time.monotonic()
        for host, step in list(self._others.items()):
            if step.is_silent(now):
                self._tell(f"{host} has said nothing for {SILENT_S:.0f} s; its part is started again")
                number = step.give_up()
                if number is not None:
                    with suppress(ShoalError):  # it has gone, or goes with the job
                        slurm.cancel(f"{self._job.number}.{number}")
            if not step.is_over:
                self._ended_at.pop(host, None)
            elif now - self._ended_at.setdefault(host, now) > AGAIN_S:
                del self._ended_at[host]
                with suppress(ShoalError):  # Slurm does not answer; at the next look
                    entry = slurm.in_queue(self._job.number)
                    if entry is not None and host in slurm.hosts_of(entry.nodes):
                        self._others[host] = self._step(host, self._gcs_address)
                        self._others[host].start()

    def _record(self) -> ClusterRecord:
        """The cluster's record as those need it who see the network and no node's files."""
        job = self._job
        path = self._directory / STATE / "shoal" / job.name / RECORD_FILE
        there = made_of(ClusterRecord, json.loads(path.read_text(encoding="utf-8")), path)
        return replace(
            there,
            provider="slurm",
            nodes=(),
            config_path=job.config_path,
            base_dir=os.path.dirname(job.config_path),
            token_path=str(job.directory / TOKEN_FILE),
            env={},
        )

    # -- its end ----------------------------------------------------------------------------------------

    def _go(self) -> int:
        """Leave, and go back into the queue where that is wanted; the exit code."""
        job = self._job
        # Who waits in the queue has not come up: nothing runs that would have to leave.
        was_up = job.phase().name == "up"
        job.enter("leaving")
        if was_up and not self._head.is_over:
            self._tell("there is notice to leave: jobs save, requests are finished")
            try:
                self._run_on_head(self._leave, heed=False)
            except ShoalError as error:
                self._tell(f"not all could leave: {error}")
        job.withdraw()
        self._end_steps()
        comes_back = not job.end_is_wanted and self._cluster.slurm.requeue and self._still_runs()
        if comes_back:
            self._tell(f"{job.words} goes back into the queue")
        job.enter("waiting" if comes_back else "ended")
        if comes_back:
            slurm.insist(lambda: slurm.requeue(job.number))
        return 0

    def _still_runs(self) -> bool:
        """Whether Slurm takes this job for one that runs: not so where it ends or requeues it already."""
        entry = slurm.insist(lambda: slurm.in_queue(self._job.number))
        return entry is not None and entry.state == "RUNNING"

    def _end_steps(self) -> None:
        steps = [*self._others.values(), self._head]
        for step in steps:
            step.end()
        deadline = time.monotonic() + END_S
        for step in steps:
            step.wait(deadline)

    # -- what it does all the time ----------------------------------------------------------------------

    def _step(self, host: str, *arguments: str) -> NodeStep:
        program = [sys.executable, *NODE_PROGRAM, self._job.name, *arguments]
        return NodeStep(slurm.step(program, node=host), self._tell, self._notice.set)

    def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for something, or for notice."""
        while not holds() and not self._notice.wait(LOOK_S):
            pass

    def _run_on_head(self, command: Sequence[str], *, heed: bool = True) -> str:
        """Run a command as one of the head's; what it prints. What it says is told.

        Args:
            heed: end it when there is notice.

        Raises:
            ShoalError: it failed.
        """
        environment = environment_of(self._directory)
        process = subprocess.Popen(
            [sys.executable, *command, "-f", str(self._directory / CONFIG_FILE)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        said: list[str] = []
        printed: list[str] = []

        def listen() -> None:
            assert process.stderr is not None, "it is piped"
            for line in process.stderr:
                said.append(line.rstrip())
                self._tell(said[-1])

        def read() -> None:
            assert process.stdout is not None, "it is piped"
            printed.append(process.stdout.read())

        listeners = [threading.Thread(target=each, daemon=True) for each in (listen, read)]
        for listener in listeners:
            listener.start()
        if heed:
            self._until(lambda: process.poll() is not None)
            if process.poll() is None:
                process.terminate()
        process.wait()
        for listener in listeners:
            listener.join()
        if process.returncode != 0 and not (heed and self._notice.is_set()):
            raise ShoalError(said[-1] if said else f"{command} failed with exit code {process.returncode}")
        return "".join(printed)

    def _tell(self, text: str) -> None:
        print(text, flush=True)
        self._job.tell(text)


def number_of(environment: Mapping[str, str]) -> str:
    """The number of the job that this process is in.

    Raises:
        ShoalError: it is in none.
    """
    number = environment.get("SLURM_JOB_ID")
    if number is None:
        raise ShoalError("this is no batch job of Slurm's: `shoal up` submits one, and so does sbatch")
    return number
