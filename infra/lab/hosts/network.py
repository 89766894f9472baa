"""Networks of hosts on this machine: network namespaces, joined by veth pairs and a bridge."""

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
from typing import Self

import psutil

from cluster.errors import ShoalError
from infra.lab.hosts.cable import QUALITY

_NETWORK = "198.18"
"""RFC 2544 sets it apart for measurements; nothing else has it."""
_MACHINE = 10
"""The last number of the machine's address; those of the hosts follow."""
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

        host eth0 -- veth -- bridge (the machine's address)

    Raises:
        ShoalError: a command of `ip` fails.
    """

    def __init__(self, hosts: int) -> None:
        self.count = hosts
        self._tag = f"shoal{secrets.token_hex(2)}"
        taken = {end.address for ends in psutil.net_if_addrs().values() for end in ends}
        subnets = [f"{_NETWORK}.{third}" for third in range(256)]
        self._subnet = secrets.choice([each for each in subnets if f"{each}.{_MACHINE}" not in taken])
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            self._bridge(ends)
            self._wire(ends)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def address(self, host: int) -> str:
        """That of a host (1 is the first); that of the machine is the one of host 0."""
        return f"{self._subnet}.{_MACHINE + host}"

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self._tag}-{host}"

    def plug(self, host: int) -> None:
        """Plug a host's cable in again."""
        _ip("link", "set", self._port(host), "up")

    def unplug(self, host: int) -> None:
        """Pull a host's cable out: nothing gets through, and nobody is told."""
        _ip("link", "set", self._port(host), "down")

    # -- making it --------------------------------------------------------------------------------------

    def _wire(self, ends: ExitStack) -> None:
        """Make the hosts and join them to the bridge."""
        for host in range(1, self.count + 1):
            name, port = self._made(self.namespace(host), ends), self._port(host)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ends.callback(_ip, "link", "del", port)  # a namespace's own end goes later than its name
            self._plug_in(host)

    def _port(self, host: int) -> str:
        return f"{self._tag}p{host}"

    def _bridge(self, ends: ExitStack) -> None:
        _ip("link", "add", self._tag, "type", "bridge")
        ends.callback(_ip, "link", "del", self._tag)
        _ip("addr", "add", f"{self.address(0)}/24", "dev", self._tag)
        _ip("link", "set", self._tag, "up")

    @staticmethod
    def _made(name: str, ends: ExitStack) -> str:
        _ip("netns", "add", name)
        ends.callback(_ip, "netns", "del", name)
        return name

    def _plug_in(self, host: int) -> None:
        _ip("link", "set", self._port(host), "master", self._tag, "up")
        name = self.namespace(host)
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _ip("-n", name, "link", "set", interface, "up")
        # Nothing goes further than the machine; but without one a host cannot tell which address is its own.
        _ip("-n", name, "route", "add", "default", "via", self.address(0))


class CabledNetwork(Network):
    """One whose cables can be cut in one direction, lose frames and delay them.

        host eth0 -- veth -- o0  [the cable's process]  i0 -- veth -- bridge (the machine's address)

    The ends that the cable's process holds lie in a namespace of their own, which has no address: nothing
    goes past it.

    Args:
        directory: where the cables' process is told what to do.
    """

    def __init__(self, hosts: int, directory: Path) -> None:
        super().__init__(hosts)
        self._told = directory / "cables"

    def cut(self, host: int, *ways: Way) -> None:
        """Let nothing through the cable of a host (1 is the first) in these directions; both by default."""
        for way in ways or Way:
            self._tell(host, way, loss=_LOST)

    def worsen(self, loss: float, delay_s: float) -> None:
        """Lose this share of all frames, and take so long for each, on every cable and in both directions."""
        for host in range(1, self.count + 1):
            for way in Way:
                self._tell(host, way, loss, delay_s)

    def mend(self) -> None:
        """Make all cables whole again."""
        self.worsen(loss=0.0, delay_s=0.0)

    def _tell(self, host: int, way: Way, loss: float, delay_s: float = 0.0) -> None:
        QUALITY.pack_into(self._qualities, (2 * (host - 1) + way.value) * QUALITY.size, loss, delay_s)

    def _wire(self, ends: ExitStack) -> None:
        wires = self._made(f"{self._tag}-wires", ends)
        for host in range(1, self.count + 1):
            name, port = self._made(self.namespace(host), ends), self._port(host)
            outer, inner = f"o{host}", f"i{host}"
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", outer, "netns", wires)
            _ip("link", "add", port, "type", "veth", "peer", "name", inner, "netns", wires)
            ends.callback(_ip, "link", "del", port)
            for end in (outer, inner):
                _ip("-n", wires, "link", "set", end, "up")
            self._plug_in(host)
        self._told.write_bytes(bytes(QUALITY.size * 2 * self.count))
        file = ends.enter_context(self._told.open("r+b"))
        self._qualities = mmap.mmap(file.fileno(), 0)
        self._start_cables(wires, ends)

    def _start_cables(self, wires: str, ends: ExitStack) -> None:
        pairs = [end for host in range(1, self.count + 1) for end in (f"o{host}", f"i{host}")]
        cable = [sys.executable, "-m", "infra.lab.hosts.cable", str(self._told), *pairs]
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
