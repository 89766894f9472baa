"""The addresses that somebody on this machine uses."""

from __future__ import annotations

import psutil

IN_USE = (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED, psutil.CONN_NONE)
"""States of sockets that someone uses; connections that have ended stay in the table for a minute."""


def addresses_in_use() -> set[str]:
    """Every local or remote address of a socket of this machine, of any user."""
    connections = [entry for entry in psutil.net_connections(kind="inet") if entry.status in IN_USE]
    return {end.ip for connection in connections for end in (connection.laddr, connection.raddr) if end}
