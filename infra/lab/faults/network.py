"""Hosts on this machine whose cables can be cut: network namespaces, joined by veth pairs and a bridge."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import subprocess
import sys
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from cluster.errors import ShoalError
from cluster.hosts.addresses import FIRST_HOST
from cluster.hosts.embedded import Hosts
from infra.lab.faults.cable import QUALITY

_NETWORK = "198.18"
"""RFC 2544 sets it apart for measurements; nothing else has it."""
_LOST = 1.0


class Way(Enum):
    """A direction of a cable, by its place in what the cables are told."""

    OUT = 0
    """From the host to all others."""
    IN = 1
    """From all others to the host."""


def missing() -> str | None:
    """Why there can be no such network here; None where there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return None if shutil.which("ip") else "there is no `ip` (iproute2) to make network namespaces with"


class Network:
    """So many hosts, as long as a `with` lasts; the machine itself is one more, to which they are joined.

        host eth0 -- veth -- o0  [the cable's process]  i0 -- veth -- bridge (the machine's address)

    The ends that the cable's process holds lie in a namespace of their own, which has no address: nothing
    goes past it.

    Raises:
        ShoalError: a command of `ip` fails.
    """

    def __init__(self, hosts: int, directory: Path) -> None:
        self._count = hosts
        self._told = directory / "cables"
        self._tag = f"shoal{secrets.token_hex(2)}"
        third = secrets.randbelow(256)
        self.subnet = f"{_NETWORK}.{third}"
        self._ends = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as ends:
            self._bridge(ends)
            wires = self._namespace(f"{self._tag}-wires", ends)
            for host in range(1, self._count + 1):
                self._join(host, wires, ends)
            self._told.write_bytes(bytes(QUALITY.size * 2 * self._count))
            file = ends.enter_context(self._told.open("r+b"))
            self._qualities = mmap.mmap(file.fileno(), 0)
            self._start_cables(wires, ends)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def hosts(self) -> Hosts:
        """Where the nodes of a cluster run: its head on the machine itself, each other on a host."""
        prefixes = [("ip", "netns", "exec", self._name(host)) for host in range(1, self._count + 1)]
        return Hosts(self.subnet, ((), *prefixes))

    # -- cables -----------------------------------------------------------------------------------------

    def cut(self, host: int, *ways: Way) -> None:
        """Let nothing through the cable of a host (1 is the first) in these directions; both by default."""
        for way in ways or Way:
            self._tell(host, way, loss=_LOST)

    def worsen(self, loss: float, delay_s: float) -> None:
        """Lose this share of all frames, and take so long for each, on every cable and in both directions."""
        for host in range(1, self._count + 1):
            for way in Way:
                self._tell(host, way, loss, delay_s)

    def mend(self) -> None:
        """Make all cables whole again."""
        self.worsen(loss=0.0, delay_s=0.0)

    def _tell(self, host: int, way: Way, loss: float, delay_s: float = 0.0) -> None:
        QUALITY.pack_into(self._qualities, (2 * (host - 1) + way.value) * QUALITY.size, loss, delay_s)

    # -- making it --------------------------------------------------------------------------------------

    def _name(self, host: int) -> str:
        return f"{self._tag}-{host}"

    def _bridge(self, ends: ExitStack) -> None:
        _ip("link", "add", self._tag, "type", "bridge")
        ends.callback(_ip, "link", "del", self._tag)
        _ip("addr", "add", f"{self._address(0)}/24", "dev", self._tag)
        _ip("link", "set", self._tag, "up")

    def _namespace(self, name: str, ends: ExitStack) -> str:
        _ip("netns", "add", name)
        ends.callback(_ip, "netns", "del", name)
        return name

    def _join(self, host: int, wires: str, ends: ExitStack) -> None:
        name, port = self._namespace(self._name(host), ends), f"{self._tag}p{host}"
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"o{host}", "netns", wires)
        _ip("link", "add", port, "type", "veth", "peer", "name", f"i{host}", "netns", wires)
        ends.callback(_ip, "link", "del", port)  # a namespace's own end goes later than its name
        _ip("link", "set", port, "master", self._tag, "up")
        for end in (f"o{host}", f"i{host}"):
            _ip("-n", wires, "link", "set", end, "up")
        _ip("-n", name, "addr", "add", f"{self._address(host)}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _ip("-n", name, "link", "set", interface, "up")

    def _address(self, host: int) -> str:
        return f"{self.subnet}.{FIRST_HOST + host}"

    def _start_cables(self, wires: str, ends: ExitStack) -> None:
        pairs = [end for host in range(1, self._count + 1) for end in (f"o{host}", f"i{host}")]
        cable = [sys.executable, "-m", "infra.lab.faults.cable", str(self._told), *pairs]
        process = subprocess.Popen(
            ["ip", "netns", "exec", wires, *cable],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        ends.enter_context(process)  # waits for its end, which is that of its input
        assert process.stdout is not None, "it is piped"
        if process.stdout.readline() != b"ready\n":
            raise ShoalError("the process that carries the cables' frames did not start")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise ShoalError(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")
