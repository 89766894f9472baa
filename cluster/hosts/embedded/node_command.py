"""The command and the environment that start one node of an embedded cluster; no processes here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.config.sections.cluster import NodeConfig
from cluster.environment import passed_on
from cluster.errors import RequestError
from cluster.hosts.embedded.identity import Identity
from cluster.hosts.processes import CLUSTER_ID, CLUSTER_STATE, KEEP_ENVIRONMENT, NODE_NAME
from cluster.hosts.settings import (
    ANOTHER_CLUSTERS,
    JOB_STOP_WAIT,
    JOB_STOP_WAIT_S,
    SERVE_SETTINGS,
    starts_at_once,
)
from cluster.state.nodes import ACCELERATOR_LABEL, NODE_LABEL
from cluster.state.record import TOKEN_FILE

LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

STORE_BYTES = 1024**3
"""Most memory of a node's object store; it holds what tasks pass to each other, not models."""
STORE_SHARE = 0.2
"""Share of the machine's memory for all object stores together."""
LEAST_STORE_BYTES = 80 * 1024**2
"""Ray refuses fewer than 75 MiB."""

TEMPORARY = "t"
"""In the session directory: temporary files of all nodes."""

TAKEN = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "PATH", "LD_LIBRARY_PATH"),
        *("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "JAVA_HOME", "CLASSPATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "KRB5CCNAME"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("all_proxy", "CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "LIBHDFS_OPTS"),
    )
)
TAKEN_PREFIXES = (
    *("LC_", "XDG_", "CONDA_", "NVIDIA_", "RAY_", "SHOAL_", "VLLM_"),
    *("AWS_", "GOOGLE_", "CLOUDSDK_", "AZURE_", "ARROW_", "HADOOP_"),
)
"""What of the caller's shell a node takes along. Anything else would reach every job of the cluster, though
only one person's shell has it: RANK and SLURM_* of another launcher, somebody's WANDB_API_KEY, HF_HOME."""


@dataclass(frozen=True)
class NodeStart:
    """One node to be started."""

    name: str
    ip: str
    shape: NodeConfig
    directory: Path
    """Ray's temp dir of this node alone: nodes that share one take each other's names. It lies in the session
    directory of its cluster."""
    gpu_indices: tuple[str, ...] = ()
    """The machine's GPUs that are this node's, as CUDA_VISIBLE_DEVICES names them."""


@dataclass(frozen=True)
class HeadPorts:
    """The ports of the head's servers, chosen beforehand so that the other nodes need not wait for it."""

    gcs: int
    client: int
    """Of the Ray client server, which `ray start` cannot leave out; it binds the head's address only."""
    raylet: int
    """A head that is started again, on a control store that outlived it, is found where it was. (Other nodes'
    raylets take any port: one that came back at the same could answer for the one that died.)"""


def store_bytes(memory_bytes: int, num_nodes: int) -> int:
    """Size of one node's object store."""
    return max(LEAST_STORE_BYTES, min(STORE_BYTES, int(memory_bytes * STORE_SHARE / num_nodes)))


def node_command(
    python: str, node: NodeStart, identity: Identity, gcs_address: str, store: int, head: HeadPorts | None
) -> list[str]:
    """The `ray start` of one node; `head` is None for all others."""
    labels = {NODE_LABEL: node.name}
    if node.shape.accelerator is not None:
        if LABEL_VALUE.fullmatch(node.shape.accelerator) is None:
            raise RequestError(
                f"cluster.nodes: accelerator {node.shape.accelerator!r} of {node.name} cannot be a label:"
                " letters, digits, `-`, `_` and `.` are allowed, at most 63"
            )
        labels[ACCELERATOR_LABEL] = node.shape.accelerator
    command = [
        *(python, "-m", "ray.scripts.scripts", "start"),
        f"--node-ip-address={node.ip}",
        f"--num-cpus={node.shape.cpus}",
        f"--num-gpus={node.shape.gpus}",
        f"--temp-dir={node.directory}",
        f"--object-store-memory={store}",
        "--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
        "--dashboard-agent-listen-port=0",  # its usual port is the same on every node
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]
    if head is None:
        return [*command, f"--address={gcs_address}"]
    return [
        *command,
        "--head",
        f"--port={head.gcs}",
        f"--ray-client-server-port={head.client}",
        f"--node-manager-port={head.raylet}",
        "--include-dashboard=true",
        f"--dashboard-host={identity.dashboard_host}",
        f"--dashboard-port={identity.dashboard_port}",
    ]


def node_environment(
    caller: Mapping[str, str],
    python: str,
    node: NodeStart,
    identity: Identity,
    gcs_address: str,
    state: Path,
    own: Mapping[str, str | None] | None = None,
) -> dict[str, str]:
    """The environment of everything that runs on the node.

    Args:
        caller: the environment of whoever calls `up`.
        python: the interpreter that runs `up`.
        gcs_address: HOST:PORT of the head's GCS.
        state: the cluster's state directory.
        own: the cluster's `env`; None passes the caller's value on.

    Raises:
        RequestError: the caller has no such value.
    """
    variables = {
        key: value
        for key, value in caller.items()
        if (key in TAKEN or key.startswith(TAKEN_PREFIXES)) and key not in ANOTHER_CLUSTERS
    }
    variables |= passed_on(own or {}, caller, "cluster.env")
    if "PYTHONPATH" in variables:
        # The nodes run elsewhere, where a relative entry would name something else.
        entries = variables["PYTHONPATH"].split(os.pathsep)
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)
    # `python` in the entrypoint of a job means the one that has Shoal, in whatever shell `up` was called.
    path = os.pathsep.join(entry for entry in (os.path.dirname(python), variables.get("PATH", "")) if entry)
    return {
        **SERVE_SETTINGS,
        **starts_at_once(),
        **variables,
        "PATH": path,
        # Its own GPUs; none, where the config gives it none, so that nothing takes what Ray did not give.
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpu_indices),
        CLUSTER_ID: identity.cluster_id,
        CLUSTER_STATE: str(state),
        NODE_NAME: node.name,
        KEEP_ENVIRONMENT: "1",
        # Ray's own actors ask Ray's API about each other, and without an address they look for any cluster
        # of this machine: a second one would mislead them.
        "RAY_ADDRESS": gcs_address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state / TOKEN_FILE),
        # Where Serve's proxy listens, whoever starts Serve: the dashboard does, for `serve deploy`.
        "RAY_SERVE_DEFAULT_HTTP_HOST": identity.serve_host,
        "RAY_USAGE_STATS_ENABLED": "0",
        JOB_STOP_WAIT: variables.get(JOB_STOP_WAIT, str(JOB_STOP_WAIT_S)),
        # Temporary files of jobs and of Ray go away with the cluster.
        "TMPDIR": str(node.directory.parent / TEMPORARY),
    }
