"""The agent of a node: an actor, one on each node, that keeps the node's fork server for all who have
processes there."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor, NoActorError
from cluster.errors import ShoalError
from cluster.node.dial import DialAddress
from cluster.node.forked_processes import FOR_FORKS, connect
from cluster.node.memory import memory_by_kind
from cluster.node.node_fork_server import send_hello
from cluster.node.surroundings import Surroundings, address_here

logger = logging.getLogger(__name__)

ENTRY_POINTS = "shoal.processes"
"""The group of the installed packages' entry points whose modules are imported for all processes."""
_NAME = "shoal-agent-"
_WAITING = 1024
"""Owners that may wait while the fork server imports."""
_ASK_EVERY_S = 2.0
_SILENCE_S = 30.0
"""A fork server that says nothing for so long, once it has imported, is replaced."""
_IMPORT_S = 600.0
_PROGRAM = (
    sys.executable,
    "-c",
    # By this process's path: it may have Shoal from elsewhere than Python by itself finds it.
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]);"
    " from cluster.node import node_fork_server; node_fork_server.main()",
)
_MOST_ANSWER = 65536
_LOOK_S = 0.05
_OTHERS_S = 10.0
_MEMORY_S = 2.0
"""How long nodes may take to say what their processes take."""
_PAUSE_S = 1.0
"""Between two tries, where one failed."""


def modules_of_processes(kind: str = "") -> list[str]:
    """The modules that the processes of a node need, as the installed packages say.

    Args:
        kind: of processes that have a fork server of their own, which imports those of the group
            ENTRY_POINTS.kind besides.
    """
    groups = (ENTRY_POINTS, f"{ENTRY_POINTS}.{kind}") if kind else (ENTRY_POINTS,)
    return sorted({point.module for group in groups for point in entry_points(group=group)})


@dataclass
class _Server:
    """A fork server of this node, and the line to it."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    began_at: float
    ready_s: float | None = None

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.wait()


class NodeAgent:
    """Keeps a fork server running from when it is made, in a thread.

    On a machine with several nodes of a cluster one of their agents does, and the others stand by.

    Args:
        address: where the fork server listens, see `address_here`.
        modules: what it imports.
    """

    def __init__(self, address: str, modules: Sequence[str]) -> None:
        self._address = address
        self._modules = modules
        self._server: _Server | None = None
        self._over = threading.Event()
        self._keeping = threading.Thread(target=self._keep, name="node's fork server", daemon=True)
        self._keeping.start()

    def facts(self) -> dict[str, Any]:
        """Of the fork server: `pid` (None: another node's agent on this machine has it), `ready_s` (how long
        its imports took; None: they are not done)."""
        server = self._server
        if server is None:
            return {"pid": None, "ready_s": None}
        return {"pid": server.process.pid, "ready_s": server.ready_s}

    def fork_for(self, whom: DialAddress, title: str = "") -> None:
        """Have a fork server of its own call whoever asks, on whichever node, for processes on this one.

        Args:
            title: what they are, for people who look at processes.

        Raises:
            ShoalError: it cannot be had.
        """
        try:
            with _patiently(self._address) as connection:
                connection.settimeout(_IMPORT_S)
                send_hello(connection, Surroundings.here(title=title), 1, 2, whom)
                answer = connection.recv(_MOST_ANSWER)  # one line, sent at once
        except OSError as error:
            raise ShoalError(f"this node's fork server does not answer: {error}") from error
        if answer != b"{}\n":
            why = json.loads(answer)["refused"] if answer else "it has ended"
            raise ShoalError(f"this node's fork server has made no process: {why}")

    def stop(self) -> None:
        """End the fork server; what it has forked goes on."""
        self._over.set()
        self._keeping.join()

    def _keep(self) -> None:
        while not self._over.is_set():
            listener = socket.socket(socket.AF_UNIX)
            with listener:
                try:
                    listener.bind(self._address)
                except OSError:
                    self._over.wait(_PAUSE_S)  # another node's agent has it
                    continue
                listener.listen(_WAITING)
                self._keep_one(listener)

    def _keep_one(self, listener: socket.socket) -> None:
        """Replace every fork server that ends; who waits at the listener is answered by the next."""
        while not self._over.is_set():
            self._server = server = self._start(listener)
            try:
                why = self._watch(server)
            finally:
                self._server = None
                server.end()
            if why is not None:
                logger.warning("the fork server of this node is replaced: %s", why)
                self._over.wait(_PAUSE_S)

    def _start(self, listener: socket.socket) -> _Server:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [listener.fileno(), theirs.fileno()]
            process = subprocess.Popen(
                [*_PROGRAM, *map(str, descriptors), json.dumps(sys.path), *self._modules],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **FOR_FORKS},
                # What is sent to this process's group does not end it.
                start_new_session=True,
            )
        return _Server(process, ours, time.monotonic())

    def _watch(self, server: _Server) -> str | None:
        """Return when it has to be replaced, and why; None: this agent ends."""
        server.line.settimeout(_ASK_EVERY_S)
        silent_s = 0.0
        while not self._over.is_set():
            try:
                if not server.line.recv(64):
                    return "it has ended"
            except TimeoutError:
                silent_s += _ASK_EVERY_S
                if silent_s > (_IMPORT_S if server.ready_s is None else _SILENCE_S):
                    return f"it has said nothing for {silent_s:.0f} s"
            except OSError as error:
                return f"its line broke: {error}"
            else:
                silent_s = 0.0
                if server.ready_s is None:
                    server.ready_s = time.monotonic() - server.began_at
                if self._over.wait(_ASK_EVERY_S):
                    return None
            if server.ready_s is not None:
                with suppress(OSError):
                    server.line.sendall(b".")
        return None


def _patiently(address: str) -> socket.socket:
    """Connect to the fork server, which another node's agent on this machine may be about to start."""
    until = time.monotonic() + _OTHERS_S
    while True:
        try:
            return connect(address)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)


def start_node_agents(nodes: Iterable[str]) -> None:
    """Start the agents of these nodes, without waiting; those that run are left alone."""
    there = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
    missing = [node for node in nodes if _NAME + node not in there]
    if not missing:
        return
    kind: Any = ray.remote(_ActorOfNode)
    for node in missing:
        kind.options(
            name=_NAME + node,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()


class _ActorOfNode(NodeAgent):
    """As Ray makes it on a node."""

    def __init__(self) -> None:
        super().__init__(address_on_node(), modules_of_processes())
        self._of_kind: dict[str, NodeAgent] = {}

    async def ask_for_fork(self, whom: DialAddress, title: str, kind: str) -> None:
        """See `fork_for`; several at once."""
        agent: NodeAgent = self
        if kind:
            if kind not in self._of_kind:
                self._of_kind[kind] = NodeAgent(f"{address_on_node()}-{kind}", modules_of_processes(kind))
            agent = self._of_kind[kind]
        await asyncio.to_thread(agent.fork_for, whom, title)

    async def memory(self) -> dict[str, int]:
        """Bytes by kind, see `memory_by_kind`."""
        servers = [agent.facts()["pid"] for agent in (self, *self._of_kind.values())]
        return await asyncio.to_thread(memory_by_kind, [pid for pid in servers if pid is not None])


async def fork_on(
    node: str, whom: DialAddress, title: str, kind: str = "", timeout_s: float = _IMPORT_S
) -> None:
    """Have a fork server call whom, for processes on a node, see `NodeAgent.fork_for`.

    Args:
        kind: see `modules_of_processes`; the server of one is started for whoever asks first.

    Raises:
        ShoalError: it cannot be had there.
    """
    agent = NamedActor(_NAME + node)
    until = time.monotonic() + _OTHERS_S
    try:
        while True:
            try:
                await agent.ask("ask_for_fork", whom, title, kind, timeout_s=timeout_s)
            except NoActorError:  # a node that has just joined
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_LOOK_S)
            else:
                return
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ShoalError) else ShoalError(str(error))) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise ShoalError(f"the agent of node {node} does not answer: {error}") from error


def memory_of_nodes(nodes: Collection[str]) -> dict[str, dict[str, int]]:
    """By node id, what fork servers and what they have made take there, see `memory_by_kind`; nodes that do
    not say it soon are left out. A machine with several nodes has one fork server, which counts at one."""
    asked: dict[ray.ObjectRef, str] = {}
    for node in nodes:
        with suppress(NoActorError, ray.exceptions.RayError):
            asked[NamedActor(_NAME + node).find().memory.remote()] = node
    if not asked:
        return {}
    found, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_MEMORY_S)
    told = {}
    for answer in found:
        with suppress(ray.exceptions.RayError):
            told[asked[answer]] = ray.get(answer)
    return told


def address_on_node() -> str:
    """Where the fork server of this node listens, in a process of Ray's."""
    return address_here(ray.get_runtime_context().gcs_address)


def node_is_kept() -> bool:
    """Whether this node has an agent, in a process of Ray's."""
    try:
        NamedActor(_NAME + ray.get_runtime_context().get_node_id()).find()
    except ShoalError:
        return False
    return True
