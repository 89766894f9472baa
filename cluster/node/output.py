"""What processes print whose owner is on another node: it is sent there, and shown among what that prints."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import struct
from contextlib import suppress

from cluster.node.dial import DialAddress, Streams, dial
from cluster.node.surroundings import show_title

OUTPUT = "output"
"""What is called for."""
_HEAD = struct.Struct("!BI")
"""The descriptor that it was written to, and how many bytes follow."""
_PIECE = 65536


def send_output(whom: DialAddress) -> None:
    """From now on, what this process and its forks print goes to whoever is called, to the last word.

    A process of its own sends it. Where that cannot, it writes where this process has written before.

    Raises:
        OSError: nobody answers there.
    """
    connection = dial(whom, OUTPUT)
    pipes = {1: os.pipe(), 2: os.pipe()}
    if os.fork() == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            show_title("shoal::Output")
            for _, written in pipes.values():
                os.close(written)
            _pass_on({read: descriptor for descriptor, (read, _) in pipes.items()}, connection)
        finally:
            os._exit(0)
    connection.close()
    for descriptor, (read, written) in pipes.items():
        os.dup2(written, descriptor)
        os.close(written)
        os.close(read)


def _pass_on(sources: dict[int, int], connection: socket.socket | None) -> None:
    """Send what comes until nobody is left who could write.

    Args:
        sources: by descriptor that is read, the one that was written to.
    """
    while sources:
        for source in select.select(list(sources), [], [])[0]:
            said = os.read(source, _PIECE)
            if not said:
                del sources[source]
                continue
            if connection is not None:
                try:
                    connection.sendall(_HEAD.pack(sources[source], len(said)) + said)
                    continue
                except OSError:
                    connection = None
            with suppress(OSError):
                os.write(sources[source], said)


async def show_output(streams: Streams) -> None:
    """Print what is sent, until it ends."""
    reader, writer = streams
    try:
        while True:
            descriptor, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            said = await reader.readexactly(length)
            while said:
                said = said[os.write(descriptor, said) :]
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        writer.close()
