"""One node of a batch job: runs as its only task there, starts Ray, and ends it when it is told to.

    python -m cluster.hosts.slurm.allocation_node CLUSTER [HOST:PORT of Ray's control store]

Slurm sends SIGTERM to every task when a job is requeued, cancelled or preempted. Jobs then save first, which
needs Ray: so SIGTERM ends nothing here, and SIGUSR2, which the first node's program sends, does. SIGTERM is
passed on to that program: where a preemption has a grace time, Slurm tells the tasks alone when it begins.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cluster.config.sections.cluster import ClusterConfig
from cluster.environment import passed_on
from cluster.errors import ShoalError
from cluster.hosts.on_host.head_config import wanted_servers
from cluster.hosts.on_host.node import clear, prepare, tail
from cluster.hosts.on_host.node_start import NodeTask, node_directory
from cluster.hosts.on_host.supervisor import supervise
from cluster.hosts.settings import TENANTS_VARIABLE
from cluster.hosts.slurm import slurm_commands as slurm
from cluster.hosts.slurm.batch_job import TENANTS, BatchJob, require_batch_job
from cluster.hosts.slurm.node_step import LIVES, NOTICE
from cluster.state.health import answers
from cluster.state.record import TOKEN_FILE

AGAIN_S = 5.0
"""After so long a node that has ended by itself is started again."""
LOOK_S = 2.0
LIVES_EVERY_S = 5.0
HEAD_SILENT_S = 60.0
"""A head that has not answered for so long does not come back."""
_ANY_PORT = 9
_MIB = 2**20


def node_task(
    job: BatchJob, cluster: ClusterConfig, environment: Mapping[str, str], head: str | None
) -> NodeTask:
    """What is to be started here, by what Slurm says of this task.

    Args:
        head: HOST:PORT of Ray's control store; None on the head.

    Raises:
        RequestError: a variable that `cluster.env` passes on is not there.
    """
    # Where srun runs, that is on the head; as seen from here.
    launched_from = environment["SLURM_LAUNCH_NODE_IPADDR"]
    asked = cluster.slurm
    cpus = int(environment["SLURM_CPUS_ON_NODE"])
    return NodeTask(
        cluster=job.name,
        mark=job.mark,
        node=environment["SLURMD_NODENAME"],
        address=_own_address(launched_from),
        head=head,
        servers=wanted_servers(cluster),
        on_network=("api", "dashboard", *(() if cluster.gateway.keys is None else ("gateway",))),
        cpus=cpus,
        gpus=asked.gpus_per_node,
        memory_bytes=_memory_bytes(environment, cpus),
        env={
            **passed_on(cluster.env, environment, "cluster.env"),
            TENANTS_VARIABLE: str(job.directory / TENANTS),
        },
    )


def _memory_bytes(environment: Mapping[str, str], cpus: int) -> int | None:
    """The memory that Slurm gives here; None where that is all, or it does not say."""
    for variable, times in (("SLURM_MEM_PER_NODE", 1), ("SLURM_MEM_PER_CPU", cpus)):
        mebibytes = environment.get(variable, "")
        if mebibytes.isdigit() and int(mebibytes) > 0:
            return int(mebibytes) * times * _MIB
    return None


def _own_address(towards: str) -> str:
    """The address of this host from which it reaches another; nothing is sent."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((towards, _ANY_PORT))
        return str(asking.getsockname()[0])


def _say(document: Mapping[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def run(name: str, head: str | None) -> int:
    """Be a node until that is over; the exit code. What changes is printed, a line of JSON each."""
    ended = threading.Event()
    noticed = threading.Event()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: noticed.set())
    signal.signal(signal.SIGUSR2, lambda *_: ended.set())
    job = require_batch_job(name)
    cluster = ClusterConfig.model_validate(job.section)
    task = node_task(job, cluster, os.environ, head)
    if head is not None:
        watching = (job.number, head, {**os.environ, **task.env}, ended, cluster.slurm.requeue)
        threading.Thread(target=watch_head, args=watching, daemon=True).start()
    token = (job.directory / TOKEN_FILE).read_text(encoding="utf-8")
    directory, step = node_directory(name), os.environ["SLURM_STEP_ID"]
    threading.Thread(target=_live, args=(task.node, ended), daemon=True).start()
    threading.Thread(target=_pass_on, args=(task.node, noticed), daemon=True).start()

    def tell(state: str, told: Mapping[str, Any]) -> None:
        said = tail(directory) if state == "failed" else ""
        _say({"node": task.node, "state": state, "told": dict(told), "said": said, "step": step})

    try:
        while True:
            prepare(task, token, directory)
            code = supervise(directory, ended, tell)
            if ended.is_set() or head is None:
                return code
            _say({"node": task.node, "state": "lost", "told": {}, "said": tail(directory)})
            if ended.wait(AGAIN_S):
                return code
    finally:
        if directory.exists():
            clear(directory)


def _live(node: str, ended: threading.Event) -> None:
    """Say again and again that this node is there."""
    while not ended.wait(LIVES_EVERY_S):
        _say({"node": node, "state": LIVES})


def _pass_on(node: str, noticed: threading.Event) -> None:
    """Say that there is notice to leave, once there is."""
    noticed.wait()
    _say({"node": node, "state": NOTICE})


def watch_head(
    number: str, head: str, environment: Mapping[str, str], ended: threading.Event, requeue: bool
) -> None:
    """Give a job back to Slurm when its head is gone: Slurm lets it run without the node that it has lost,
    where nothing of the cluster is left that could do so.

    Args:
        number: the job's.
        head: HOST:PORT of Ray's control store.
        environment: that of Ray on the nodes.
    """
    answered = time.monotonic()
    while not ended.wait(LOOK_S):
        try:
            is_there = answers(head, environment=environment)
        except ShoalError:  # a certificate cannot be read just now, which says nothing of the head
            continue
        if is_there:
            answered = time.monotonic()
        elif time.monotonic() - answered > HEAD_SILENT_S:
            print(f"the head has not answered for {HEAD_SILENT_S:.0f} s", file=sys.stderr, flush=True)
            with suppress(ShoalError):  # another node was faster
                (slurm.requeue if requeue else slurm.cancel)(number)
            return


def main(arguments: list[str]) -> int:
    """Be the node that the arguments name."""
    name, *head = arguments
    try:
        return run(name, head[0] if head else None)
    except ShoalError as error:
        _say(
            {"node": os.environ.get("SLURMD_NODENAME", ""), "state": "failed", "told": {}, "said": str(error)}
        )
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
