"""Ray in a pod of KubeRay's: started by its operator's command, ended when the pod has to go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from cluster.hosts.endpoints import API_PORT, DASHBOARD_PORT
from cluster.hosts.kubernetes.manifests import (
    ADDRESS,
    CONFIG_KEY,
    CONFIG_PLACE,
    POD_GATEWAY_PORT,
    node_gateway_port,
)
from cluster.hosts.on_host.host_ports import EVERYWHERE, GCS_PORT
from cluster.hosts.probe_agent import ProbeAgent
from cluster.state.health import answers, wait_until

HEAD_FILE = "pod.yaml"
"""The config of commands on the head, among what they know of clusters."""
START_COMMAND = "KUBERAY_GEN_RAY_START_CMD"
"""Names the command with which KubeRay's operator would start Ray in a container."""
START_S = 300.0
"""Longest that Ray may take to start: its files may be read over a network for the first time."""
DRAIN_ASK_S = 30.0
END_S = 5.0
STAY = (ProbeAgent.__name__,)
"""Actors that every node has."""
_REASON = "its pod is about to be deleted"


class RayInPod:
    """Ray as it runs in this container.

    Args:
        environment: that of the container.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        try:
            self._command = environment[START_COMMAND]
            self.address = environment[ADDRESS]
        except KeyError as error:
            raise ShoalError(f"this is no pod of KubeRay's: {error.args[0]} is not set") from error

    def start(self) -> None:
        """Start it; it stays until `end`, or ends by itself."""
        # As KubeRay itself does: Ray opens many files.
        files = 'ulimit -n "${RAY_START_ULIMIT_OPEN_FILES:-65536}" 2>/dev/null || true'
        command = f"{files}; exec {self._command}"
        self.process = subprocess.Popen(["bash", "-c", command], start_new_session=True)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def until_up(self, ended: threading.Event) -> None:
        """Wait until this node is one of the cluster's, or until somebody wants its end.

        Raises:
            ShoalError: it has ended, or takes too long.
        """
        joined = wait_until(lambda: self._has_joined() or self.is_over or ended.is_set(), START_S)
        if self.is_over:
            raise ShoalError(f"Ray has ended with exit code {self.process.returncode}")
        if not joined:
            raise ShoalError(f"Ray did not start here within {START_S:.0f} s")

    def _has_joined(self) -> bool:
        address = f"{self.address}:{GCS_PORT}"
        if not answers(address):
            return False
        from cluster.ray_private import node_ids_by_address

        # Its control store answers before it knows of any node.
        return self.address in node_ids_by_address(address, DRAIN_ASK_S)

    def drain(self, seconds: float | None) -> str:
        """Have nothing new start here, and tell those that run here to leave; Ray's id of this node.

        Args:
            seconds: so long they have; None: Serve's replicas stay until others run in their place.

        Raises:
            ShoalError: Ray does not answer.
        """
        node = _node_at(self.address)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", _REASON),
            *(() if seconds is None else ("--deadline-remaining-seconds", f"{max(0.0, seconds):.0f}")),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_ASK_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ShoalError(f"this node cannot be drained: no answer for {DRAIN_ASK_S:.0f} s") from error
        if done.returncode != 0:
            raise ShoalError(f"this node cannot be drained: {(done.stderr or done.stdout).strip()[-300:]}")
        return node

    def is_left(self, node: str) -> bool:
        """Whether nobody runs on this node any more, as far as the head says; a head that is gone says so.

        Args:
            node: Ray's id of this node.
        """
        from ray.util.state import list_actors
        from ray.util.state.exception import RayStateApiException

        head = os.environ["RAY_ADDRESS"].rpartition(":")[0]
        try:
            actors = list_actors(
                address=f"http://{head}:{DASHBOARD_PORT}",
                filters=[("node_id", "=", node), ("state", "=", "ALIVE")],
                timeout=int(DRAIN_ASK_S),
            )
        except (RayStateApiException, ConnectionError, RuntimeError):
            return True
        return all(actor.class_name in STAY for actor in actors)

    def end(self) -> None:
        """End it with all that runs there."""
        if self.is_over:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        if not self.is_over:  # it waits for actors to leave, whose time is over
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _node_at(address: str) -> str:
    """Ray's id of the node at an address.

    Raises:
        ShoalError: there is none, or Ray does not say.
    """
    from cluster.ray_private import node_ids_by_address

    found = node_ids_by_address(os.environ["RAY_ADDRESS"], DRAIN_ASK_S).get(address)
    if found is None:
        raise ShoalError(f"Ray knows no node at {address}")
    return found


def section_of_pod() -> ClusterConfig:
    """The cluster's section of the config, as it was when the objects were made."""
    return ClusterConfig.model_validate_json(Path(CONFIG_PLACE, CONFIG_KEY).read_text(encoding="utf-8"))


def section_on_head_pod(cluster: ClusterConfig, address: str) -> dict[str, Any]:
    """The section under which commands run on the head: to them the cluster is one that exists.

    Args:
        address: of the head's pod.
    """
    section: dict[str, Any] = json.loads(cluster.model_dump_json(exclude_unset=True))
    for key in ("nodes", "kubernetes", "dashboard"):
        section.pop(key, None)
    # By the Service they are asked at the pod's address, by `kubectl port-forward` at its loopback.
    everywhere = {} if cluster.gateway.keys is None else {"host": EVERYWHERE}
    # The Service leads to these ports, whichever the config names.
    section["api"] = {"host": EVERYWHERE, **section.get("api", {}), "port": API_PORT}
    section["gateway"] = {**everywhere, **section.get("gateway", {}), "port": POD_GATEWAY_PORT}
    if cluster.gateway.has_front:
        section["gateway"]["node_port"] = node_gateway_port(cluster)
    return {**section, "name": cluster.name, "provider": "existing", "address": f"{address}:{GCS_PORT}"}
