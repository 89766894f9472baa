"""Where the gateway's requests are answered, as far as it knows: replicas, and how they fail; no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from serve_apps.openai.errors import ApiError
from serve_apps.tokens.inbox import Item


class ReplicaLostError(Exception):
    """The replica ended while it had the request.

    Args:
        broken: a name of the engine that broke; None where it was shut down, or cannot be reached.
    """

    def __init__(self, message: str, broken: str | None = None) -> None:
        super().__init__(message)
        self.broken = broken


class Backend(Protocol):
    """Where choices are generated."""

    def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        """Send one request to a replica of the application; closing the iterator ends it there.

        Raises:
            ReplicaLostError: the replica ended before the last item.
            ApiError: it cannot be sent.
        """

    async def ask(self, application: str, method: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a replica of the application returns at once: `start`, and the answer or `error`.

        Raises:
            ReplicaLostError, ApiError: as `generate`.
        """

    async def kept(self, application: str, request: str, wait_s: float) -> Mapping[int, str]:
        """The replicas that keep the parts of a request whose gateway is gone.

        Args:
            request: its key.
            wait_s: how long to wait for word of them.
        """


def raise_if_failed(result: Mapping[str, Any]) -> None:
    """Raise what a replica says went wrong with a request, if it does.

    Raises:
        ReplicaLostError, ApiError
    """
    if result.get("engine_broke"):
        raise ReplicaLostError(result["error"]["message"], result["start"]["replica"])
    if "error" in result:
        raise ApiError.from_item(result)
