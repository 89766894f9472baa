"""How a cluster in pods is reached from here: by `kubectl port-forward`, which stays from `up` to `down`."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from cluster.errors import ShoalError
from cluster.hosts.endpoints import free_port
from cluster.hosts.kubernetes.kubectl import Kubectl
from cluster.loopback import own_address
from cluster.state.health import wait_until
from cluster.state.record import made_of, read_document, write_document
from cluster.state.state_directory import state_directory

_FILE = "kubernetes.json"
OPEN_S = 20.0
ASK_S = 5.0


@dataclass(frozen=True)
class KubernetesCluster:
    """A cluster that was brought up from here.

    Attributes:
        ports: of the head's pod, and of this machine's loopback where they come out.
        names: of those servers, by their ports in the pod.
        process: the number of the kubectl that forwards them; 0 before it does.
    """

    name: str
    config_path: str
    namespace: str
    context: str | None
    ports: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    process: int = 0

    @property
    def kubectl(self) -> Kubectl:
        """That of its namespace."""
        return Kubectl(self.namespace, self.context)

    def write(self) -> None:
        """Keep it."""
        write_document(state_directory(self.name) / _FILE, asdict(self))

    def forwarding(self, servers: Mapping[str, int]) -> KubernetesCluster:
        """The same with ports of this machine for servers of the head's pod."""
        own = own_address()
        return replace(
            self,
            ports={str(port): self.ports.get(str(port)) or free_port(own) for port in servers.values()},
            names={name: str(port) for name, port in servers.items()},
        )

    def endpoints(self) -> dict[str, Any]:
        """Where the servers are, for the cluster's record."""
        own, port = own_address(), {name: self.ports[there] for name, there in self.names.items()}
        return {
            "api_host": own,
            "api_port": port["api"],
            "gateway_host": own,
            "gateway_port": port["gateway"],
            "api_certificate": None,
        }

    def open_way(self) -> None:
        """Have the ports forwarded.

        Raises:
            ShoalError: kubectl does not.
        """
        api = self.ports[self.names["api"]]
        if self._runs() and _hears(api):
            return
        self.close()
        pairs = [f"{here}:{there}" for there, here in self.ports.items()]
        selector = f"--selector=ray.io/cluster={self.name},ray.io/node-type=head"
        (pod, *_) = self.kubectl.run("get", "pods", selector, "--output=name").split() or [""]
        if not pod:
            raise ShoalError(f"cluster {self.name} has no head: `shoal up` waits for one")
        command = self.kubectl.command("port-forward", f"--address={own_address()}", pod, *pairs)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives the command that starts it
        )
        replace(self, process=process.pid).write()
        if not wait_until(lambda: _hears(api) or process.poll() is not None, OPEN_S):
            raise ShoalError(f"`kubectl port-forward` did not open a way within {OPEN_S:.0f} s")
        if process.poll() is not None:
            raise ShoalError(f"`kubectl port-forward` to {pod} has ended with exit code {process.returncode}")

    def close(self) -> None:
        """Have them forwarded no more."""
        if self._runs():
            psutil.Process(self.process).terminate()

    def _runs(self) -> bool:
        """Whether the process is there still, and no other one with its number."""
        try:
            return bool(self.process) and "port-forward" in psutil.Process(self.process).cmdline()
        except psutil.Error:
            return False


def _hears(port: int) -> bool:
    """Whether whoever asks at a forwarded port hears anything of the other side."""
    try:
        with socket.create_connection((own_address(), port), timeout=ASK_S) as client:
            client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return client.recv(1) != b""
    except OSError:
        return False


def read_cluster(name: str) -> KubernetesCluster | None:
    """The cluster of a name, where it was brought up from here and not taken down."""
    path = state_directory(name) / _FILE
    found = read_document(path)
    return None if found is None else made_of(KubernetesCluster, found, path)
