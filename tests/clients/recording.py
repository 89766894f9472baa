"""A wire between a client and the gateway that notes every byte: what a failing client really sent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

BUFFER_BYTES = 65536


class Recording:
    """Connections are passed on as they are, and both sides of each are written to a file of its own."""

    def __init__(self, host: str, port: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                self._connections += 1
                path = self.folder / f"{self._connections:03}"
                threading.Thread(target=self._carry, args=(client, path), daemon=True).start()

    def _carry(self, client: socket.socket, path: Path) -> None:
        with client, socket.create_connection(self._upstream) as server:
            answers = threading.Thread(
                target=_pass_on, args=(server, client, path.with_suffix(".answered")), daemon=True
            )
            answers.start()
            _pass_on(client, server, path.with_suffix(".sent"))
            answers.join()


def _pass_on(source: socket.socket, sink: socket.socket, path: Path) -> None:
    """Until nothing comes any more; the other direction goes on."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while data := source.recv(BUFFER_BYTES):
            file.write(data)
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def recorded(host: str, port: int, folder: Path) -> Iterator[Recording]:
    """A wire to this address, noted in the folder."""
    wire = Recording(host, port, folder)
    try:
        yield wire
    finally:
        wire.close()
