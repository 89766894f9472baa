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

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GatewayOptions:
        return cls(document.get("unknown_fields") == "ignore", tuple(document.get("cors", ())))
