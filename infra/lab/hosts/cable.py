"""A program that is the cables of a network: it passes frames on, and loses and delays them as it is told.

Linux has `tc netem` for this, but not every kernel is built with it. Frames are passed on with the header of
their offloads (packet(7), PACKET_VNET_HDR): large segments and open checksums stay what they were.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import random
import selectors
import socket
import struct
import sys
import time
from pathlib import Path

QUALITY = struct.Struct("=dd")
"""How a cable is in one direction: the share of frames that it loses, and the seconds that it takes."""

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL = 263, 15, 23, 3  # linux/if_packet.h, linux/if_ether.h
_RECEIVE_BYTES = 16 * 2**20
_FRAME_BYTES = 2**17
_AT_ONCE = 64


def _end(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)  # takes nothing until it is bound
    end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    end.bind((interface, _ALL))
    end.setblocking(False)
    return end


def carry(qualities: mmap.mmap, cables: list[tuple[str, str]]) -> None:
    """Carry frames until standard input ends.

    Args:
        qualities: QUALITY of each cable, from its first interface to its second and back; may change.
        cables: the two interfaces of each.
    """
    random.seed(0)
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    numbers = itertools.count()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for place, names in enumerate(cables):
        ends = [_end(name) for name in names]
        for way, (source, target) in enumerate((ends, ends[::-1])):
            selector.register(source, selectors.EVENT_READ, (target, (2 * place + way) * QUALITY.size))
    while True:
        ready = selector.select(max(0.0, waiting[0][0] - time.monotonic()) if waiting else None)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _put(waiting[0][2], waiting[0][3])
            heapq.heappop(waiting)
        for key, _ in ready:
            if key.data is None:
                return
            target, offset = key.data
            loss, delay_s = QUALITY.unpack_from(qualities, offset)
            for frame in _frames(key.fileobj):  # type: ignore[arg-type]
                if random.random() < loss:
                    continue
                if delay_s:
                    heapq.heappush(waiting, (now + delay_s, next(numbers), target, frame))
                else:
                    _put(target, frame)


def _frames(source: socket.socket) -> list[bytes]:
    frames = []
    for _ in range(_AT_ONCE):
        try:
            frames.append(source.recv(_FRAME_BYTES))
        except OSError:  # none is left, or the interface is down
            break
    return frames


def _put(target: socket.socket, frame: bytes) -> None:
    try:
        target.send(frame)
    except OSError:  # as a cable does: it is lost
        return


if __name__ == "__main__":
    with Path(sys.argv[1]).open("rb") as file:
        told = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        print("ready", flush=True)
        carry(told, list(zip(sys.argv[2::2], sys.argv[3::2], strict=True)))
