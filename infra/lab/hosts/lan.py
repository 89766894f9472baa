"""A local network of hosts, as long as a `with` lasts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from infra.lab.hosts import network
from infra.lab.hosts.boot import SYSTEM, Build
from infra.lab.hosts.host import Host
from infra.lab.hosts.network import Network

REPOSITORY = Path(__file__).resolve().parents[3]
_NEEDED = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "nsenter": "util-linux",
    "pivot_root": "util-linux",
}
FIRST_USER = 2001


def missing() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    for program, package in _NEEDED.items():
        if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            return f"there is no `{program}` ({package}) to make hosts with"
    return network.missing()


def software() -> tuple[str, ...]:
    """What is installed here for Python, and this very Shoal: hosts see it in the same places."""
    places = {Path(sys.prefix), Path(sys.base_prefix), REPOSITORY}
    # What lies in another of them, or in the system, is there already.
    there = [Path("/", name) for name in SYSTEM]
    return tuple(
        str(place)
        for place in sorted(places)
        if not any(place.is_relative_to(other) for other in (*places, *there) if other != place)
    )


class Lan:
    """Hosts that share a network, and nothing else but what they are told to.

    Args:
        names: of the hosts.
        directory: of this machine, for their disks and logs.
        shared: (place on every host) to (directory of this machine), as a file server's are.
        users: people beside root, on every host.
        wires: makes the network of so many hosts.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Path,
        *,
        shared: Mapping[str, Path] | None = None,
        users: Sequence[str] = (),
        wires: Callable[[int], Network] = Network,
    ) -> None:
        self._names = list(names)
        self._directory = directory
        self._shared = dict(shared or {})
        self._users = tuple((name, FIRST_USER + place) for place, name in enumerate(users))
        self.network = wires(len(self._names))
        self.hosts: list[Host] = []
        self._ends = ExitStack()

    def __enter__(self) -> Lan:
        with ExitStack() as ends:
            ends.enter_context(self.network)
            self._make_key()
            for number in range(1, len(self._names) + 1):
                host = self._host(number)
                self.hosts.append(host)
                ends.callback(host.halt)
            with ThreadPoolExecutor(len(self.hosts)) as side_by_side:
                list(side_by_side.map(Host.boot, self.hosts))
            self._write_known_hosts()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def key(self) -> Path:
        """The private key that lets one in everywhere."""
        return self._directory / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The hosts' keys, as OpenSSH's client reads them."""
        return self._directory / "known_hosts"

    def host(self, name: str) -> Host:
        return self.hosts[self._names.index(name)]

    def _host(self, number: int) -> Host:
        name = self._names[number - 1]
        place = self._directory / name
        place.mkdir()
        build = Build(
            name=name,
            address=self.network.address(number),
            disk=str(place / "disk"),
            names={each: self.network.address(place + 1) for place, each in enumerate(self._names)},
            software=software(),
            shared=tuple((target, str(source)) for target, source in self._shared.items()),
            users=self._users,
            authorized=self.key.with_suffix(".pub").read_text().strip(),
        )
        return Host(self.network, number, build, place)

    def _make_key(self) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)

    def _write_known_hosts(self) -> None:
        lines = []
        for host in self.hosts:
            kind, key, *_ = host.file("/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
            lines.append(f"{host.name},{host.address} {kind} {key}\n")
        self.known_hosts.write_text("".join(lines))
