"""The head dies by SIGKILL and comes back on a control store that outlived it (Ray's GCS on Redis)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.config.sections.cluster import NodeConfig
from cluster.hosts.embedded.identity import read_identity
from cluster.hosts.embedded.node_command import HeadPorts, NodeStart, node_command, node_environment
from cluster.hosts.embedded.session_directory import session_directory
from cluster.hosts.processes import NODE_NAME
from cluster.state.connection import head_is_silent
from cluster.state.health import answers, wait_until
from cluster.state.state_directory import state_directory
from tests import clusters
from tests.clusters import LiveCluster

BACK_S = 120.0

BEGIN = """
import json, logging, sys, threading, time
import ray
ray.init(namespace="shoal", log_to_driver=False, logging_level=logging.ERROR)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from cluster.errors import ShoalError
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand

class Tenant:
    def __init__(self):
        self.answers, self.held = [], ()
        self.broker = BrokerClient()
        wanted = Demand("broker-test/a", "training", {"CPU": 1}, 2, 3)
        self.grant = self.broker.wait(wanted, timeout_s=20).nodes
        threading.Thread(target=self.beat, daemon=True).start()
    def beat(self):
        while True:
            try:
                demand = Demand("broker-test/a", "training", {"CPU": 1}, 2, 3, self.grant)
                self.answers.append(self.broker.request(demand).nodes)
            except ShoalError as error:
                self.answers.append(str(error))
            time.sleep(0.5)
    def told(self):
        return self.grant, self.answers
"""

COME = """
node = next(row["NodeID"] for row in ray.nodes() if row["Resources"].get("CPU"))
tenant = ray.remote(Tenant).options(
    name="tenant", lifetime="detached", num_cpus=0,
    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
).remote()
print(json.dumps(ray.get(tenant.told.remote())))
"""

LOOK = """
tenant, began = ray.get_actor("tenant"), time.monotonic()
known = len(ray.get(tenant.told.remote())[1])
while time.monotonic() - began < BACK_S:
    grant, answers = ray.get(tenant.told.remote(), timeout=30)
    if len(answers) > known + 4 and all(not isinstance(answer, str) for answer in answers[-4:]):
        break
    time.sleep(0.5)
other = BrokerClient().request(Demand("broker-test/b", "training", {"CPU": 1}, 2, 2)).units
print(json.dumps({"grant": grant, "answers": answers, "other": other, "seconds": time.monotonic() - began}))
""".replace("BACK_S", str(BACK_S))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
def test_the_broker_comes_back_with_a_head_that_died_and_a_tenant_keeps_what_it_has(tmp_path: Path):
    with redis(tmp_path) as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
        patch.setattr(clusters, "caller_environment", environment_with_redis(clusters.caller_environment))
        with clusters.started(tmp_path / "cluster") as cluster:
            come = cluster.python(BEGIN + COME, timeout_s=60)
            assert come.returncode == 0, come.stderr
            kill_head(cluster)
            restart_head(cluster)
            assert head_is_silent(cluster.record) is None, "the record says where the head is"
            look = cluster.python(BEGIN + LOOK, timeout_s=BACK_S + 60)
            assert look.returncode == 0, look.stderr
    answer = json.loads(look.stdout.splitlines()[-1])
    # Whatever was asked while the broker was away failed; no answer took anything from the tenant.
    assert all(said == answer["grant"] for said in answer["answers"] if not isinstance(said, str)), answer
    assert answer["answers"][-1] == answer["grant"]
    assert answer["other"] == 0, "granted what the tenant holds"
    print(f"the broker answered {answer['seconds']:.1f} s after the head was there again")


def environment_with_redis(plain):
    return lambda: {**plain(), "RAY_REDIS_ADDRESS": os.environ["RAY_REDIS_ADDRESS"]}


@contextlib.contextmanager
def redis(directory: Path) -> Iterator[int]:
    """The port of a Redis of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(directory),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: can_connect(port), timeout_s=20)
        yield port
    finally:
        server.terminate()
        server.wait(timeout=20)


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def kill_head(cluster: LiveCluster) -> None:
    """SIGKILL for every process of the head node: the control store, its raylet, the actors on it."""
    processes = [each for each in clusters.marked_processes(cluster.record.cluster_id) if on_head(each)]
    assert processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=20)
    assert not answers(cluster.record.gcs_address, timeout_s=1)


def on_head(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.environ().get(NODE_NAME) == "head"
    return False


def restart_head(cluster: LiveCluster) -> None:
    """What an operator does, or Kubernetes: the same node again, at the same address."""
    record = cluster.record
    state, directory = state_directory(record.name), session_directory(record.name)
    identity = read_identity(record.name)
    assert identity is not None
    node = NodeStart("head", record.head_ip, NodeConfig(name="head", cpus=0), directory / "n0")
    # `ray start` would take the workers, which name the old head, for a cluster that runs at this address.
    (node.directory / "ray_current_cluster").unlink(missing_ok=True)
    known = (record.gcs_address, record.nodes[0].raylet_address)
    gcs, raylet = (int(address.rpartition(":")[2]) for address in known)
    with socket.socket() as probe:
        probe.bind((record.head_ip, 0))
        ports = HeadPorts(gcs, client=probe.getsockname()[1], raylet=raylet)
    command = node_command(sys.executable, node, identity, record.gcs_address, 100 * 2**20, ports)
    caller = {**clusters.caller_environment()}
    variables = node_environment(caller, sys.executable, node, identity, record.gcs_address, state)
    done = subprocess.run(command, env=variables, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
