"""How much memory processes take, pages that they share with others counted by their share.

What Ray calls its workers' processes is private; a test fails when that changes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import psutil

MARKS = ("SHOAL_CLUSTER_ID", "SHOAL_NODE")
"""Variables that all processes of a node have alike; see cluster.hosts.processes."""
FORK_SERVER = "ForkServer"
_TITLE = re.compile(r"shoal::(\w+)|ray::([\w:-]+)")
"""How processes are called that a fork server has made: what they are, and whose. And Ray's, by their actor's
class, or what that calls itself."""


def memory_of(pids: Iterable[int]) -> int:
    """Bytes of memory that processes take; those that are gone take none."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total


def memory_by_kind(servers: Iterable[int]) -> dict[str, int]:
    """The same of all that fork servers and Ray have made on this node, by what it is: ForkServer, Engine,
    ParkedEngine, Rank; of Ray's, RayTrainWorker, GroupRunner, Broker and so on, and
    `ServeReplica:APP:REVISION`, those that stand by included.

    Args:
        servers: those of the node itself, which are fork servers too.
    """
    found: Counter[str] = Counter()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            title = _TITLE.match(" ".join(process.cmdline()))
            if title is not None and _is_of_this_node(process):
                found[_kind(title)] += process.memory_full_info().pss
    found[FORK_SERVER] += memory_of(servers)
    return dict(found)


def _kind(title: re.Match[str]) -> str:
    kind = title[1] or title[2]
    return kind.removesuffix(":replica")


def _is_of_this_node(process: psutil.Process) -> bool:
    theirs = process.environ()
    return all(theirs.get(name) == os.environ.get(name) for name in MARKS)


def memory_of_owner() -> int:
    """The same of all that this process's owner has here: the fork server that has forked this process, and
    whatever came of that."""
    with suppress(psutil.Error):
        server = psutil.Process(os.getppid())
        return memory_of([server.pid, *(each.pid for each in server.children(recursive=True))])
    return memory_of([os.getpid()])
