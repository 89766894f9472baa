"""Stores by which ranks find one another."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

_TIMEOUT_S = 60.0


def open_store(host: str) -> tuple[dist.TCPStore, str]:
    """A store that listens on one address only, and where; torch's own would listen on all of them."""
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def reach_store(address: str) -> dist.TCPStore:
    """The store that another rank has opened at this address (host:port)."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
