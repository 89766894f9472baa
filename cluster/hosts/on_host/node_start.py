"""What a host is told when Ray is to be started on it, and what is known there of a node that was."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.hosts.on_host.host_ports import HeadPlaces
from cluster.hosts.processes import CLUSTER_ID, KEEP_ENVIRONMENT, NODE_NAME
from cluster.hosts.settings import ANOTHER_CLUSTERS, SERVE_SETTINGS, starts_at_once
from cluster.hosts.short_paths import short_directory
from cluster.state.nodes import ACCELERATOR_LABEL, NODE_LABEL
from cluster.state.record import TOKEN_FILE

START_FILE, STATUS_FILE = "start.json", "status.json"
LOCK_FILE = "lock"
"""Held by the node's supervisor for as long as the node runs."""
LOG_FILE = "node.log"
RAY = "ray"
"""Ray's temp dir, in the node's directory."""
CONFIG_FILE = "shoal.yaml"
OBJECT_STORE = 0.3
"""The share of a node's memory that Ray's object store gets, as Ray itself has it."""
METRIC_PORTS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
"""Ray's usual ones are the same for all clusters."""
_OF_THE_LOGIN = ("SSH_", "SHOAL_", "SLURM_", "SLURMD_", "PMI_", "PMIX_")
"""Variables begin so that are of whoever has logged in, or of one task of a batch job: programs take the
latter for ranks of theirs."""
_OF_SLURM_KEPT = ("SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
STATE = "state"
"""On the head, in the node's directory: what the commands there know of the cluster."""


@dataclass(frozen=True)
class NodeTask:
    """A node to be started.

    Attributes:
        cluster: the cluster's name.
        mark: in the environment of all that runs on the node, and no other cluster's.
        address: of the host, in the network of the nodes.
        head: HOST:PORT of Ray's control store; None for the head itself, which chooses it.
        servers: host and port that the config names for the servers of the head.
        on_network: those of them that listen at `address` where it names no host.
        cpus, gpus, memory_bytes: None for what Ray finds.
        env: variables of all that runs there.
    """

    cluster: str
    mark: str
    node: str
    address: str
    head: str | None = None
    servers: Mapping[str, tuple[str | None, int | None]] = field(default_factory=dict)
    on_network: Sequence[str] = ()
    cpus: int | None = None
    gpus: int | None = None
    memory_bytes: int | None = None
    accelerator: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def root_directory() -> Path:
    """The directory of all nodes of this user on this host."""
    return Path(tempfile.gettempdir(), f"shoal-{os.getuid()}")


def node_directory(cluster: str) -> Path:
    """The directory of this host's node of a cluster; `@` is in no cluster's name.

    Raises:
        ShoalError: its path would be too long for Ray's sockets.
    """
    return short_directory(root_directory(), f"@{cluster}")


def ray_command(python: str, task: NodeTask, directory: Path, places: HeadPlaces | None) -> list[str]:
    """The `ray start` of a node; `places` are None for all but the head."""
    labels = {NODE_LABEL: task.node}
    if task.accelerator is not None:
        labels[ACCELERATOR_LABEL] = task.accelerator
    command = [
        *(python, "-m", "ray.scripts.scripts", "start"),
        f"--node-ip-address={task.address}",
        f"--temp-dir={directory / RAY}",
        "--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
        # Another Ray may stand on this host, whose ports are the same if nothing is said.
        *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]
    command += [] if task.cpus is None else [f"--num-cpus={task.cpus}"]
    command += [] if task.gpus is None else [f"--num-gpus={task.gpus}"]
    if task.memory_bytes is not None:
        store = int(task.memory_bytes * OBJECT_STORE)
        command += [f"--memory={task.memory_bytes - store}", f"--object-store-memory={store}"]
    if places is None:
        return [*command, f"--address={task.head}"]
    host, port = places.servers["dashboard"]
    return [
        *command,
        "--head",
        f"--port={places.gcs_port}",
        f"--ray-client-server-port={places.client_port}",
        "--include-dashboard=true",
        f"--dashboard-host={host}",
        f"--dashboard-port={port}",
    ]


def ray_environment(
    login: Mapping[str, str],
    python: str,
    task: NodeTask,
    directory: Path,
    gcs_address: str,
    places: HeadPlaces | None,
) -> dict[str, str]:
    """The environment of all that runs on a node.

    Args:
        login: that of whoever logs in on the host.
        places: as for `ray_command`.
    """
    kept = {
        key: value
        for key, value in login.items()
        if key not in ANOTHER_CLUSTERS and (key in _OF_SLURM_KEPT or not key.startswith(_OF_THE_LOGIN))
    }
    metrics = {} if places is None else dict(zip(METRIC_PORTS, map(str, places.metrics), strict=True))
    path = os.pathsep.join(entry for entry in (os.path.dirname(python), kept.get("PATH", "")) if entry)
    return {
        **SERVE_SETTINGS,
        **starts_at_once(),
        **kept,
        **task.env,
        **metrics,
        "PATH": path,  # `python` in the entrypoint of a job means the one that has Shoal
        CLUSTER_ID: task.mark,
        NODE_NAME: task.node,
        KEEP_ENVIRONMENT: "1",
        "RAY_ADDRESS": gcs_address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(directory / TOKEN_FILE),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
