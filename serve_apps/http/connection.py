"""uvicorn's protocol, which answers clients of HTTP/1.0 as they can read it.

It rests on names inside uvicorn's own protocol (`cycle`, its `chunked_encoding` and
`expected_content_length`), all private; tests/serve_apps/front/test_odd_clients.py watches them.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class _AnyLength(int):
    """Stands for the length of a body in uvicorn's bookkeeping where any is right."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _AnyLength:
        return self


class Connection(HttpToolsProtocol):
    """To HTTP/1.0 an answer without a length ends where the connection does: it knows no chunks."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()
