"""kubectl for tests: the real one, but for `port-forward`, whose connections come out in the network of a
pod's host. Run as a program: `port_forward.py FILE ARGUMENT…`, FILE with the network namespaces by pod."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster.loopback import own_address

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of Linux' setns(2)."""
_CHUNK = 1 << 16


def shim(directory: Path, networks: Path) -> Path:
    """Put it there as `kubectl`; the directory that PATH should begin with."""
    found = shutil.which("kubectl")
    assert found is not None, "there is a kubectl"
    programs = directory / "programs"
    programs.mkdir()
    script = programs / "kubectl"
    root = Path(__file__).parent.parent
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" port-forward "*)\n'
        f'    PYTHONPATH={root} exec {sys.executable} -m tests.port_forward {networks} "$@";;\nesac\n'
        f'exec {found} "$@"\n'
    )
    script.chmod(0o755)
    return programs


def _carry(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(_CHUNK):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


def _serve(listener: socket.socket, port: int) -> None:
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection((own_address(), port))
        except OSError:
            client.close()
            continue
        for pair in ((client, server), (server, client)):
            threading.Thread(target=_carry, args=pair, daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    networks = json.loads(Path(arguments[0]).read_text())
    words = [each for each in arguments[1:] if not each.startswith("--")]
    _, pod, *pairs = words
    listeners = []
    for pair in pairs:
        here, there = map(int, pair.split(":"))
        listeners.append((socket.create_server((own_address(), here)), there))
    # What listens stays where it was made; what connects from now on does so in the pod's network.
    descriptor = os.open(f"/run/netns/{networks[pod.rpartition('/')[2]]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    for listener, port in listeners:
        threading.Thread(target=_serve, args=(listener, port), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
