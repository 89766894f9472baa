"""What the config says of the gateway beside where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GatewayOptions:
    """Fields of `cluster.gateway`."""

    ignore_unknown: bool = False
    """Whether fields that nobody knows are passed over."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may ask."""

    token_ports: tuple[int, int] | None = None
    """The first and the last port at which tokens may be received; None: any."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GatewayOptions:
        ports = document.get("token_ports")
        first, _, last = (ports or "").partition("-")
        return cls(
            document.get("unknown_fields") == "ignore",
            tuple(document.get("cors", ())),
            (int(first), int(last or first)) if ports else None,
        )
