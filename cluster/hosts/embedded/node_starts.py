"""The `ray start` of each node of an embedded cluster, from its beginning until its node is up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.errors import ShoalError
from cluster.hosts.embedded.identity import Identity
from cluster.hosts.embedded.node_command import (
    HeadPorts,
    NodeStart,
    node_command,
    node_environment,
    store_bytes,
)
from cluster.state.health import answers, wait_until

START_TIMEOUT_S = 90.0
"""Longest that the nodes may take to start."""
TAIL_LINES = 15
LOGS = "logs"
"""In the state directory: what the nodes' starts printed."""


@dataclass(frozen=True)
class _Launched:
    """A `ray start` that was begun; it ends when its node is up."""

    node: NodeStart
    process: subprocess.Popen[bytes]
    log: Path


class NodeStarts:
    """The starts of a cluster's nodes.

    Args:
        nodes: the head first.
        ports: the head's.
        gcs_address: where its GCS is to listen.
        state: the cluster's state directory.
        own: variables of the config for all nodes.
        tls: variables by which its GCS is spoken to.
    """

    def __init__(
        self,
        nodes: Sequence[NodeStart],
        identity: Identity,
        ports: HeadPorts,
        gcs_address: str,
        state: Path,
        own: Mapping[str, str | None],
        tls: Mapping[str, str],
    ) -> None:
        self._nodes = nodes
        self._identity = identity
        self._ports = ports
        self._gcs_address = gcs_address
        self._state = state
        self._own = own
        self._tls = tls
        self._store = store_bytes(psutil.virtual_memory().total, len(nodes))
        self._deadline = time.monotonic() + START_TIMEOUT_S
        self._launched: list[_Launched] = []

    @contextmanager
    def reaped(self) -> Iterator[None]:
        """Leave no `ray start` behind as a child of ours when starting fails."""
        try:
            yield
        except BaseException:
            for item in self._launched:
                item.process.kill()
                item.process.wait()
            raise

    def begin(self) -> None:
        """Start the head, and the others as soon as its GCS answers; the head is up when this returns.

        Raises:
            ShoalError: a node did not start, or not in time.
        """
        self._launch(self._nodes[0], self._ports)
        self._wait(lambda: answers(self._gcs_address, 1.0, self._tls), "did not begin to answer")
        for node in self._nodes[1:]:
            self._launch(node, None)
        self._wait(lambda: self._launched[0].process.poll() == 0, "did not start")

    def wait(self) -> None:
        """Wait until all have started.

        Raises:
            ShoalError: a node did not start, or not in time.
        """
        self._wait(lambda: all(item.process.poll() == 0 for item in self._launched), "did not start")

    def _launch(self, node: NodeStart, head: HeadPorts | None) -> None:
        command = node_command(sys.executable, node, self._identity, self._gcs_address, self._store, head)
        variables = node_environment(
            os.environ, sys.executable, node, self._identity, self._gcs_address, self._state, self._own
        )
        log = self._state / LOGS / f"{node.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=variables,
                cwd=node.directory.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we then end these by their mark
            )
        self._launched.append(_Launched(node, process, log))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def reached() -> bool:
            for item in self._launched:
                code = item.process.poll()
                if code not in (None, 0):
                    raise _failed(item, f"did not start (exit code {code})")
            return condition()

        if not wait_until(reached, self._deadline - time.monotonic()):
            late = [item for item in self._launched if item.process.poll() is None]
            raise _failed(late[-1] if late else self._launched[0], f"{what} within {START_TIMEOUT_S:.0f} s")


def _failed(item: _Launched, what: str) -> ShoalError:
    lines = item.log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(f"  {line}" for line in lines[-TAIL_LINES:] if line.strip()) or "  (it printed nothing)"
    return ShoalError(f"node {item.node.name} ({item.node.ip}) {what}; it said last:\n{tail}")
