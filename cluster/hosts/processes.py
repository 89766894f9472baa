"""Finding and ending the processes of a cluster, and no other.

Every process of a cluster carries SHOAL_CLUSTER_ID in its environment, inherited from the `ray start` that
began it: raylets, agents, workers, job drivers, Serve's replicas and whatever those start. That outlives
the process that called `up`, Ray's own bookkeeping and the loss of parents.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

import psutil

from cluster.errors import ShoalError

CLUSTER_ID = "SHOAL_CLUSTER_ID"
CLUSTER_STATE = "SHOAL_CLUSTER_STATE"
"""The cluster's state directory: finds its processes when the directory itself is lost."""
NODE_NAME = "SHOAL_NODE"
"""The node's name; what runs on a node inherits it."""
KEEP_ENVIRONMENT = "SPT_NOENV"
"""Ray writes process titles over argv and, without this, over the environment that marks the process."""

TERM_DEADLINE_S = 2.0
"""Seconds that processes have to end by themselves."""
KILL_DEADLINE_S = 15.0
"""Seconds after which a process that SIGKILL did not end is reported."""
POLL_S = 0.03


def marked(variable: str, value: str) -> list[psutil.Process]:
    """The live processes, other than this one, whose environment has `variable=value`."""
    return [process for process in _others() if _environment(process).get(variable) == value]


def cluster_ids(state_directory: str) -> set[str]:
    """The ids of the clusters whose processes say that their state is in this directory."""
    environments = [_environment(process) for process in _others()]
    return {
        environment[CLUSTER_ID]
        for environment in environments
        if environment.get(CLUSTER_STATE) == state_directory and CLUSTER_ID in environment
    }


def of_node(cluster_id: str, node: str) -> list[psutil.Process]:
    """The live processes of one node of a cluster."""
    return [
        process for process in marked(CLUSTER_ID, cluster_id) if _environment(process).get(NODE_NAME) == node
    ]


def end_cluster(cluster_id: str) -> int:
    """End every process of a cluster and return how many there were.

    SIGTERM, then SIGKILL to what is left after a deadline; looked for again until none is found, because
    processes start others while they are being ended.

    Raises:
        ShoalError: some did not end even then (they wait inside the kernel).
    """
    seen: set[psutil.Process] = set()
    termed: set[psutil.Process] = set()
    start = time.monotonic()
    pause = threading.Event()
    while True:
        # A child with an environment of its own choosing is still ours; it is found by its parent, and
        # remembered, since that parent may be gone at the next look.
        seen |= _with_children(cluster_id, marked(CLUSTER_ID, cluster_id))
        alive = {process for process in seen if _is_alive(process)}
        if not alive:
            return len(seen)
        waited_s = time.monotonic() - start
        if waited_s > KILL_DEADLINE_S:
            pids = ", ".join(str(process.pid) for process in sorted(alive, key=lambda item: item.pid))
            raise ShoalError(f"these processes did not end within {KILL_DEADLINE_S:.0f} s of SIGKILL: {pids}")
        if waited_s < TERM_DEADLINE_S:
            _send(alive - termed, signal.SIGTERM)
            termed |= alive
        else:
            _send(alive, signal.SIGKILL)
        pause.wait(POLL_S)


def _with_children(cluster_id: str, processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    found = set(processes)
    # psutil's own `children` reads the whole process table, for each process that is asked for its own.
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    for process in _others():
        with suppress(psutil.Error):  # it ended while we looked
            children[process.ppid()].append(process)
    parents = list(found)
    while parents:
        parent = parents.pop()
        # A pid that is another's by now leads to nobody's children. One that carries another cluster's mark
        # was started by `up` from inside this one; it is not ours.
        own = {
            child
            for child in children[parent.pid]
            if _is_younger(child, parent) and _environment(child).get(CLUSTER_ID, cluster_id) == cluster_id
        }
        parents += own - found
        found |= own
    return found


def _is_younger(child: psutil.Process, parent: psutil.Process) -> bool:
    try:
        return bool(child.create_time() >= parent.create_time())
    except psutil.Error:
        return False


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _others() -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if process.pid != os.getpid()]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):  # ended, a zombie, or another user's: none of them ours to end
        return {}


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
