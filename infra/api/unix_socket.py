"""HTTP over a unix socket of this machine, behind which the service is."""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.request
from functools import partial
from typing import Any


class _Plain(http.client.HTTPConnection):
    """One to whoever listens at a path."""

    def __init__(self, host: str, *, path: str, **named: Any) -> None:
        super().__init__(host, **named)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Tls(_Plain):
    """The same, for a service that speaks TLS."""

    def connect(self) -> None:
        super().connect()
        context = ssl.create_default_context()
        # Whoever made the socket has seen to it who is behind it.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.sock = context.wrap_socket(self.sock)


class UnixSocketHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens URLs over a socket, whatever host they name.

    Args:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Plain, path=self._path), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Tls, path=self._path), req)
