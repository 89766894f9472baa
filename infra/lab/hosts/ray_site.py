"""Ray on hosts of their own, as people start it: its head on this machine, and a node on each host."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from cluster.errors import ShoalError
from cluster.hosts.endpoints import free_ports
from cluster.hosts.processes import CLUSTER_ID, KEEP_ENVIRONMENT, NODE_NAME, end_cluster
from cluster.ray_private import read_credentials_again
from cluster.state.record import TOKEN_FILE, new_token
from cluster.state.state_directory import write_private
from infra.lab.environment import in_environment
from infra.lab.hosts.host import LOGIN, Host
from infra.lab.hosts.lan import REPOSITORY, Lan

START_S = 90.0
STORE_BYTES = 100 * 2**20
"""Memory of a node's object store; Ray would take a third of this machine's for each."""


class RaySite:
    """Ray on a network, as long as a `with` lasts: this machine is its head, and has no CPUs to give; each
    host is a node of one, which goes by its name.

    Meanwhile this process has Ray's token in its environment, and may join.

    Args:
        lan: its hosts.
        shared: a directory of this machine that all hosts see in the same place: for the token.

    Attributes:
        mark: SHOAL_CLUSTER_ID of all of its processes, which are processes of this machine too.
        address: HOST:PORT of Ray's control store.
    """

    def __init__(self, lan: Lan, shared: Path) -> None:
        self._lan = lan
        self._token = shared / TOKEN_FILE
        self._ip = lan.network.address(0)
        self.mark = str(uuid.uuid4())
        self.address = ""
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            # Short, since Ray's sockets lie in it.
            directory = ends.enter_context(tempfile.TemporaryDirectory(prefix="shoal-ray-", dir="/tmp"))
            write_private(self._token, new_token())
            # A token in RAY_AUTH_TOKEN would win over the file.
            ends.enter_context(in_environment({**self._credentials, "RAY_AUTH_TOKEN": None}))
            read_credentials_again()
            ends.callback(end_cluster, self.mark)
            self._start_head(directory)
            with ThreadPoolExecutor(len(self._lan.hosts)) as side_by_side:
                list(side_by_side.map(self.start_node, self._lan.hosts))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def start_node(self, host: Host) -> None:
        """Start Ray on a host, which has none; waits for `ray start`.

        Raises:
            ShoalError: it did not start.
        """
        options = [f"--address={self.address}", "--num-cpus=1"]
        command = self._command(host.address, *options)
        done = host.run(*command, environment=self._variables(host.name), timeout_s=START_S)
        _require_started(host.name, done)

    def _start_head(self, directory: str) -> None:
        gcs, client, dashboard = free_ports(("0.0.0.0", self._ip, self._ip))
        self.address = f"{self._ip}:{gcs}"
        options = [
            "--head",
            f"--port={gcs}",
            f"--ray-client-server-port={client}",
            f"--dashboard-host={self._ip}",
            f"--dashboard-port={dashboard}",
            "--dashboard-agent-listen-port=0",  # another Ray of this machine may have the usual one
            f"--temp-dir={directory}",
            "--num-cpus=0",
        ]
        command, home = self._command(self._ip, *options), str(Path.home())
        variables = {**LOGIN, "HOME": home, **self._variables("head")}
        done = subprocess.run(
            command, env=variables, cwd=directory, capture_output=True, text=True, timeout=START_S
        )
        _require_started("the head", done)

    @property
    def _credentials(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}

    def _variables(self, node: str) -> dict[str, str]:
        return {
            **self._credentials,
            "PYTHONPATH": str(REPOSITORY),
            # Ray's own actors look for any cluster of this machine otherwise.
            "RAY_ADDRESS": self.address,
            CLUSTER_ID: self.mark,
            NODE_NAME: node,
            KEEP_ENVIRONMENT: "1",
        }

    @staticmethod
    def _command(ip: str, *options: str) -> list[str]:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}"]
        return [*ray, f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", *options]


def _require_started(name: str, done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise ShoalError(f"Ray does not start on {name}: {done.stdout}{done.stderr}")
