"""Faults of nodes: one that is lost and comes back, and a head that dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress

import psutil

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from cluster.hosts.embedded.identity import read_identity
from cluster.hosts.embedded.node_command import (
    HeadPorts,
    NodeStart,
    node_command,
    node_environment,
    store_bytes,
)
from cluster.hosts.embedded.session_directory import session_directory
from cluster.hosts.processes import of_node
from cluster.state.connection import ClusterRecord
from cluster.state.health import answers
from cluster.state.state_directory import state_directory

START_TIMEOUT_S = 90.0
_GONE_S = 20.0


def kill_node(record: ClusterRecord, name: str) -> None:
    """SIGKILL for every process of a node; on return they are gone."""
    while processes := of_node(record.cluster_id, name):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_GONE_S)


def start_node(record: ClusterRecord, name: str) -> None:
    """Start a node that has died again, at its address, as an operator would; waits for `ray start`.

    Raises:
        ShoalError: it did not start.
    """
    identity = read_identity(record.name)
    assert identity is not None, "the cluster was started"
    cluster = ClusterConfig.model_validate(identity.cluster)
    shapes, directory = cluster.node_shapes(), session_directory(record.name)
    index = [each for each, _ in shapes].index(name)
    node = NodeStart(name, record.nodes[index].ip, shapes[index][1], directory / f"n{index}")
    ports = None
    if index == 0:
        # `ray start` would take the workers, which name the old head, for a cluster that runs here.
        (node.directory / "ray_current_cluster").unlink(missing_ok=True)
        gcs, raylet = (
            int(address.rpartition(":")[2])
            for address in (record.gcs_address, record.nodes[0].raylet_address)
        )
        with socket.socket() as probe:
            probe.bind((record.head_ip, 0))
            ports = HeadPorts(gcs, client=probe.getsockname()[1], raylet=raylet)
    store = store_bytes(psutil.virtual_memory().total, len(shapes))
    done = subprocess.run(
        node_command(sys.executable, node, identity, record.gcs_address, store, ports),
        env=node_environment(
            os.environ, sys.executable, node, identity, record.gcs_address, state_directory(record.name)
        ),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise ShoalError(f"node {name} did not start again: {done.stdout}{done.stderr}")


def kill_head(record: ClusterRecord) -> None:
    """SIGKILL for every process of the head node: the control store, its raylet, the drivers and actors."""
    kill_node(record, record.nodes[0].name)
    if answers(record.gcs_address, 1.0, record.tls):
        raise ShoalError(f"the control store at {record.gcs_address} survived the head")
