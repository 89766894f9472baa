"""A cluster on hosts, for real: their processes are found by what each host calls them, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.hosts.processes import CLUSTER_ID, marked
from infra.lab.faults.cluster_on_hosts import WORKERS
from infra.lab.faults.laboratory import VICTIM, Laboratory
from infra.lab.faults.processes import newest_ranks, node_of, rank_process
from infra.lab.hosts import lan
from infra.lab.hosts.lan import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(lan.missing() is not None, reason=str(lan.missing())),
]
UP = """
import time
from infra.lab.faults.laboratory import Laboratory
with Laboratory(lambda _: None) as lab:
    raylet = lab.on_hosts.cluster.raylet("worker-0")
    print(raylet.environ()["SHOAL_CLUSTER_ID"], lab.on_hosts._network.namespace(1), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory(print) as lab:
        yield lab


def test_ranks_are_found_on_their_hosts_and_a_loss_of_power_ends_them(lab: Laboratory) -> None:
    hosts = lab.on_hosts
    job = hosts.cluster.submit("whole")
    job.until_steps(1)
    spaces = {node: os.readlink(f"/proc/{hosts.cluster.raylet(node).pid}/ns/pid") for node in WORKERS}
    assert len({*spaces.values(), os.readlink("/proc/self/ns/pid")}) == 1 + len(WORKERS)
    ranks = newest_ranks(job)
    assert {each["rank"] for each in ranks} == {0, 1}
    for each in ranks:
        process = rank_process(job, each["rank"])
        assert os.readlink(f"/proc/{process.pid}/ns/pid") == spaces[each["node"]]
        assert process.pid != each["pid"], "it has a number of its host's"
    victim, node = rank_process(job, VICTIM), node_of(job, VICTIM)
    assert {each.pid for each in job.rank_processes()} == {rank_process(job, rank).pid for rank in (0, 1)}
    hosts.cut_power(node)
    assert not victim.is_running()
    assert hosts.cluster.processes("", node) == []
    assert len(job.rank_processes()) <= 1


def networks() -> str:
    """The names of all network namespaces and interfaces."""
    listed = [["ip", "netns", "list"], ["ip", "-br", "link"]]
    return "".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in listed)


def test_all_of_it_ends_with_an_interruption() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    up = subprocess.Popen([sys.executable, "-c", UP], env=environment, stdout=subprocess.PIPE, text=True)
    assert up.stdout is not None
    mark, namespace = up.stdout.readline().split()
    assert len(marked(CLUSTER_ID, mark)) > len(WORKERS)
    assert namespace in networks()
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=120)
    assert marked(CLUSTER_ID, mark) == []
    assert namespace.rpartition("-")[0] not in networks()
