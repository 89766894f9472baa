"""OpenSSH's client: one connection a host, over which all commands and ports go."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shlex
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cluster.errors import RequestError, ShoalError
from cluster.hosts.on_host.node_start import root_directory
from cluster.hosts.on_host.result_line import RESULT
from cluster.hosts.provider import Tell
from cluster.hosts.ssh.refusals import why_refused
from cluster.loopback import own_address
from cluster.state.state_directory import require_private

CONNECT_S = 10
ALIVE_EVERY_S, ALIVE_TIMES = 15, 4
"""After a minute without an answer a connection is given up."""
IDLE_S = 600
"""So long a connection that nobody uses is kept."""
BEGIN = "shoal-begin"
"""The line before what a command prints; shells print what they like before it."""
SSH_FAILED, NO_PROGRAM = 255, 127
_LAST_LINES = 16


class HostError(ShoalError):
    """A host cannot be reached, or a program on it failed, perhaps since the request was wrong."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(frozen=True)
class Destination:
    """How a host is reached.

    Attributes:
        node: the name of the node that it is.
        host: as OpenSSH's client is to call it.
        options: of OpenSSH's client, as in ssh_config(5).
    """

    node: str
    host: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What people call it."""
        at = self.host if self.user is None else f"{self.user}@{self.host}"
        return f"{self.node} ({at if self.port is None else f'{at}, port {self.port}'})"

    def arguments(self) -> list[str]:
        """Those of OpenSSH's client, the host last."""
        found = [f"-o{key}={value}" for key, value in self.options.items()]  # of two, it takes the first
        found += [] if self.user is None else ["-l", self.user]
        found += [] if self.port is None else ["-p", str(self.port)]
        found += [] if self.identity_file is None else ["-i", self.identity_file]
        return [*found, "--", self.host]


def sockets_directory() -> Path:
    """Where the connections' sockets are, of this machine and this user: short, as paths of sockets must be.

    Raises:
        ShoalError: it is somebody else's.
    """
    root = root_directory()
    for directory in (root, root / "~ssh"):
        require_private(directory)
    return root / "~ssh"


class Connection:
    """A host, and commands on it. Not tied to a thread.

    Args:
        keep: hold the connection until it is closed, and not only while somebody uses it.
    """

    def __init__(self, destination: Destination, *, keep: bool = False) -> None:
        self.destination = destination
        self._keep = keep
        said = json.dumps([*destination.arguments(), str(Path.home())])
        self._socket = sockets_directory() / hashlib.sha256(said.encode()).hexdigest()[:16]

    def open(self) -> None:
        """Connect; nothing happens where a connection is there.

        Raises:
            HostError: the host does not answer, or does not let us in.
        """
        if self.is_open() and self._answers():
            return
        with self._socket.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another command may connect just now
            self._connect()

    def _connect(self) -> None:
        if self.is_open():
            if self._answers():
                return
            self._control("exit")  # the host has lost its power, or the network changed
        self._socket.unlink(missing_ok=True)  # one that was killed leaves it behind
        identity = self.destination.identity_file
        if identity is not None and not Path(identity).is_file():
            raise HostError(
                f"{self.destination.words}: there is no key file {identity}", RequestError.exit_code
            )
        persist = "yes" if self._keep else str(IDLE_S)
        # Into the background once we are let in. It keeps what it was given for errors: a file, no pipe.
        with tempfile.TemporaryFile("w+") as errors:
            command = [*self._ssh("-M", "-N", "-f", f"-oControlPersist={persist}")]
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, check=False
            ).returncode
            errors.seek(0)
            said = errors.read()
        if code != 0:
            raise HostError(f"{self.destination.words}: {why_refused(said)}")

    def is_open(self) -> bool:
        """Whether a connection is there; the host may be gone all the same."""
        return self._control("check")

    def _answers(self) -> bool:
        command = [*self._ssh("-T"), "true"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONNECT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode != SSH_FAILED

    def close(self) -> None:
        """End the connection, and all that goes over it."""
        if self._socket.exists():
            self._control("exit")
        for left in (self._socket, self._socket.with_suffix(".lock")):
            left.unlink(missing_ok=True)

    def forward(self, path: Path | None, port: int, to: str) -> bool:
        """Let what connects to a socket or a port of this machine's loopback come out at HOST:PORT there.

        Returns whether it can: a port may be taken.
        """
        # Of several addresses that a name has, ssh is content with one.
        here = f"{own_address()}:{port}" if path is None else str(path)
        return self._control("forward", f"-L{here}:{to}")

    def command(self, remote: Sequence[str] = (), *, terminal: bool = False) -> list[str]:
        """What runs a command there, or a shell; with the same exit code, or 255 where ssh fails itself."""
        return [*self._ssh("-t" if terminal else "-T"), *([shlex.join(remote)] if remote else [])]

    def run(
        self,
        remote: Sequence[str],
        given: str = "",
        *,
        tell: Tell | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Run a command there to its end; what it prints.

        Args:
            remote: the program and its arguments; a program that begins with ~/ is in the home there.
            given: its standard input.
            tell: takes each line of its standard error; what it says last before it fails is the error's.

        Raises:
            HostError: it failed, or took too long; with the last of what it said.
        """
        program, *arguments = remote
        text = " ".join(
            ["echo", f"{BEGIN};", in_shell(program), *(shlex.quote(argument) for argument in arguments)]
        )
        process = subprocess.Popen(
            [*self._ssh("-T"), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        said: list[str] = []
        assert process.stderr is not None, "it is piped"
        held: list[str] = []

        def listen(line: str) -> None:
            said.append(line)
            if tell is not None and line.strip():
                for before in held:
                    tell(before)
                held[:] = [line.rstrip()]

        listener = threading.Thread(target=_listen, args=(process.stderr, listen), daemon=True)
        listening, process.stderr = process.stderr, None  # the listener reads it, and nobody else
        listener.start()
        try:
            printed, _ = process.communicate(given, timeout_s)
        except BaseException as error:
            process.kill()
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise HostError(f"{self.destination.words}: no answer within {timeout_s:.0f} s") from error
            raise
        finally:
            listener.join()
            listening.close()
        if process.returncode == 0:
            for line in held:
                assert tell is not None, "nothing is held else"
                tell(line)
            return printed.partition(f"{BEGIN}\n")[2]
        code = RequestError.exit_code if process.returncode == RequestError.exit_code else 1
        raise HostError(self._failure(process.returncode, program, said, tell is not None), code)

    def ask(
        self, remote: Sequence[str], document: Mapping[str, Any], source: str = "", timeout_s: float = 60.0
    ) -> Any:
        """Run a program there that takes one JSON document and prints another; see `answer`.

        Args:
            source: what its standard input begins with, before the document.
        """
        printed = self.run(remote, f"{source}{json.dumps(document)}\n", timeout_s=timeout_s)
        for line in reversed(printed.splitlines()):
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        raise HostError(f"{self.destination.words}: no answer came, but: {printed[-200:]!r}")

    def _failure(self, code: int, program: str, said: Sequence[str], told: bool) -> str:
        words = self.destination.words
        if code == SSH_FAILED:
            return f"{words}: {why_refused(''.join(said))}"
        if code in (NO_PROGRAM, NO_PROGRAM - 1):
            return f"{words}: {program} cannot be run there: {said[-1].strip() if said else 'not found'}"
        last = [line.rstrip() for line in said if line.strip()][-1 if told else -_LAST_LINES :]
        if told and last:
            return last[0]  # it follows what was told
        return f"{words}: " + ("\n  ".join(last) or f"{program} failed there with exit code {code}")

    def _control(self, what: str, *options: str) -> bool:
        if not self._socket.exists():
            return False
        command = self._ssh("-O", what, *options)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return done.returncode == 0

    def _ssh(self, *options: str) -> list[str]:
        return [
            "ssh",
            f"-oControlPath={self._socket}",
            *options,
            *self.destination.arguments()[:-2],
            "-oBatchMode=yes",
            "-oStreamLocalBindUnlink=yes",  # a connection that was killed leaves its sockets behind
            f"-oConnectTimeout={CONNECT_S}",
            f"-oServerAliveInterval={ALIVE_EVERY_S}",
            f"-oServerAliveCountMax={ALIVE_TIMES}",
            "-oLogLevel=ERROR",
            *self.destination.arguments()[-2:],
        ]


def leads_through(path: Path) -> bool:
    """Whether whoever asks at a forwarded socket hears anything of the other side, be it that nobody is
    there; of a host that has lost its power one hears nothing."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(CONNECT_S / 2)
        try:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            client.recv(1)
        except OSError:
            return False
    return True


def in_shell(program: str) -> str:
    """A program as a shell takes it; the home is that of who logs in."""
    if program.startswith("~/"):
        return f'"$HOME"/{shlex.quote(program[2:])}'
    return shlex.quote(program)


def _listen(stream: IO[str], take: Callable[[str], None]) -> None:
    for line in stream:
        take(line)
