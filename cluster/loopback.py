"""The address at which a machine reaches itself, and nobody else does; elsewhere nobody names it."""

from __future__ import annotations

import ipaddress
import socket

NAME = "localhost"


def own_address() -> str:
    """The loopback address of this machine."""
    return str(socket.getaddrinfo(None, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def is_own(host: str) -> bool:
    """Whether an address, or a name that a config may hold, is one of loopback's for certain."""
    try:
        return host == NAME or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may come to mean anything
