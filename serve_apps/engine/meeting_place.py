"""Where the ranks of one replica meet: an address that is theirs from when it is chosen until they come."""

from __future__ import annotations

import socket

from cluster.loopback import own_address


class MeetingPlace:
    """A port of this node's loopback address that nobody else is given until `close`.

    It is bound, and not listened on: rank 0 can listen there at once, or minutes later when its libraries are
    loaded (both sockets say SO_REUSEADDR), while the system gives the port to no other program.
    """

    def __init__(self) -> None:
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # All ranks of a replica are on one node, so that nobody else need reach it.
        self.host = own_address()
        self._reserved.bind((self.host, 0))
        self.port = int(self._reserved.getsockname()[1])

    def close(self) -> None:
        """Give the port back."""
        self._reserved.close()
