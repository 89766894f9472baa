"""How ranks find one another: stores, and the interface at which a node is reached."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

_REACH_S = 60.0
"""Whoever opens a store has done so before it says where."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def open_store(host: str) -> tuple[dist.TCPStore, str]:
    """A store that listens on one address only, and where; torch's own would listen on all of them."""
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_REACH_S),
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def reach_store(address: str) -> dist.TCPStore:
    """The store that another rank has opened at this address (host:port)."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_REACH_S))


def join(backend: str, store: dist.Store, place: tuple[int, int], limit_s: float) -> None:
    """Make the default process group of the ranks that share a store.

    NCCL's first operation in a group waits at the store for the rank that names the group: as long as the
    store says, and torch tells that only stores that it has opened itself.

    Args:
        place: this rank, and how many there are.
        limit_s: longest that one rank may be behind another, here and in each collective.
    """
    limit = timedelta(seconds=limit_s)
    store.set_timeout(limit)
    rank, world_size = place
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def use_interface_of(host: str) -> None:
    """Let gloo and NCCL of this process listen where this node is reached, unless the user has said where.

    Gloo asks by itself what the machine's name resolves to, which on many machines is a loopback address, at
    which no other node reaches it (the environment variables of torch.distributed). NCCL takes the first
    interface that it finds, which may be a container's; its data goes over InfiniBand all the same.

    Args:
        host: this node's address.
    """
    interface = interface_of(host)
    if interface is not None:
        for variable in _INTERFACES:
            os.environ.setdefault(variable, interface)


def record_flights(prefix: str) -> None:
    """Have NCCL remember its last operations, and write them down when asked, or where one takes too long.

    torch's flight recorder; `torchfrtrace` reads the files, `train_jobs.watch.flight_recorder` asks. What the
    user has set stays.

    Args:
        prefix: of the files' path, on a disk of this node, which has pipes; the rank is put behind it.
    """
    for variable, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", prefix),
    ):
        os.environ.setdefault(variable, value)


def interface_of(host: str) -> str | None:
    """The network interface that has this address; None where none has (as all but one of loopback)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == host for each in addresses):
            return name
    return None
