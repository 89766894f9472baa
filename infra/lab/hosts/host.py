"""One computer of its own on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from cluster.errors import ShoalError
from infra.lab.hosts.boot import READY, Build
from infra.lab.hosts.network import Network

_DEATH_S = 20.0
LOGIN = {"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"}
"""The environment of everybody who logs in; home and name come with the user."""


class Host:
    """A host of a network: it has a disk, memory, processes and a name of its own, and an sshd.

    Args:
        number: its place in the network, from 1.
        place: a directory of this machine for what belongs to it.
    """

    def __init__(self, network: Network, number: int, build: Build, place: Path) -> None:
        self.name, self.address = build.name, build.address
        self._network, self._number = network, number
        self._build, self._place = build, place
        self._namespaces: subprocess.Popen[bytes] | None = None
        self._first = 0

    def boot(self) -> None:
        """Start it, or start it again after its power was cut; its disk is as it was.

        Raises:
            ShoalError: it does not come up.
        """
        self._place.joinpath("root").mkdir(exist_ok=True)
        Path(self._build.disk).mkdir(exist_ok=True)
        self._place.joinpath("build.json").write_text(self._build.as_json())
        self._network.plug(self._number)
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child"]
        told = [str(self._place / name) for name in ("build.json", "root")]
        boot = [sys.executable, "-m", "infra.lab.hosts.boot", *told]
        with self._place.joinpath("boot.log").open("wb") as log:
            process = subprocess.Popen(
                # Not `ip netns exec`, which would mount another /sys, without the control groups.
                ["nsenter", f"--net=/run/netns/{self._network.namespace(self._number)}", *namespaces, *boot],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None, "it is piped"
        if process.stdout.readline().decode().strip() != READY:
            process.kill()
            process.wait()
            raise ShoalError(f"{self.name} does not come up: {self._place.joinpath('boot.log').read_text()}")
        self._namespaces = process
        (first,) = psutil.Process(process.pid).children()
        self._first = first.pid

    def cut_power(self) -> None:
        """End everything on it at once; nobody hears of it, since nothing is sent any more."""
        self._network.unplug(self._number)
        self.halt()

    def halt(self) -> None:
        """End everything on it at once."""
        if self._namespaces is None:
            return
        first, self._first = psutil.Process(self._first), 0
        first.kill()  # the kernel ends all others with it
        self._namespaces.wait(_DEATH_S)
        for pipe in (self._namespaces.stdin, self._namespaces.stdout):
            assert pipe is not None, "it is piped"
            pipe.close()
        self._namespaces = None

    @property
    def is_up(self) -> bool:
        return self._namespaces is not None

    def file(self, path: str) -> Path:
        """Where this machine finds a file of the host's own disk."""
        return Path(self._build.disk) / path.lstrip("/")

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on it, but for its first process and its sshd."""
        if not self.is_up:
            return []
        its_own = os.readlink(f"/proc/{self._first}/ns/pid")
        found = []
        for each in psutil.process_iter():
            with suppress(OSError, psutil.Error):  # it has ended
                here = each.pid != self._first and os.readlink(f"/proc/{each.pid}/ns/pid") == its_own
                if here and each.status() != psutil.STATUS_ZOMBIE and each.name() != "sshd":
                    found.append(each)
        return found

    def commands(self) -> list[tuple[psutil.Process, list[str]]]:
        """Its processes with what each was started with; what ends meanwhile is left out."""
        found = []
        for each in self.processes():
            with suppress(psutil.Error):
                found.append((each, each.cmdline()))
        return found

    def running(self, words: str) -> list[psutil.Process]:
        """Its processes with these words in their command line; Ray's tell what they do, after a name."""
        return [each for each, command in self.commands() if words in " ".join(command)]

    def names(self) -> set[str]:
        """What its processes are called."""
        found = set()
        for each in self.processes():
            with suppress(psutil.Error):
                found.add(each.name())
        return found

    # -- commands ---------------------------------------------------------------------------------------

    def command(
        self,
        arguments: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        user: str = "root",
    ) -> list[str]:
        """What runs a command on it, in the home of a user."""
        home = "/root" if user == "root" else f"/home/{user}"
        variables = {**LOGIN, "HOME": home, "USER": user, "LOGNAME": user, **(environment or {})}
        settings = [f"{key}={value}" for key, value in variables.items()]
        enter = ["nsenter", f"--target={self._first}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        who = ["setpriv", "--pdeathsig=KILL"]
        if user != "root":
            who += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return [*enter, *who, "env", "-i", f"--chdir={home}", *settings, *map(str, arguments)]

    def run(
        self,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        user: str = "root",
        timeout_s: float = 120.0,
        given: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on it to its end; the result is not checked.

        Args:
            given: its standard input.
        """
        return subprocess.run(
            self.command(arguments, environment, user),
            capture_output=True,
            text=True,
            input=given or "",
            timeout=timeout_s,
        )

    def start(
        self,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        user: str = "root",
        output: int | IO[Any] = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start a command on it; its output goes to `output`."""
        return subprocess.Popen(
            self.command(arguments, environment, user),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
