"""What the config says of the gateway beside where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

AddressRange = IPv4Network | IPv6Network


@dataclass(frozen=True)
class GatewayOptions:
    """Fields of `cluster.gateway`."""

    ignore_unknown: bool = False
    """Whether fields that nobody knows are passed over."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may ask."""
    metrics_from: tuple[AddressRange, ...] = ()
    """Where the gateway's figures may be read from without a key."""
    keepalive_s: float = 15.0
    """How long a stream may be silent; 0: for ever."""
    token_ports: tuple[int, int] | None = None
    """The first and the last port at which tokens may be received; None: any."""
    alone: bool = True
    """Whether there is one gateway, and so nobody that places and limits are shared with."""
    front_secret: str | None = None
    """What the front shows with each request; None: there is no front."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GatewayOptions:
        ports = document.get("token_ports")
        first, _, last = (ports or "").partition("-")
        return cls(
            ignore_unknown=document.get("unknown_fields") == "ignore",
            cors=tuple(document.get("cors", ())),
            metrics_from=tuple(ip_network(each) for each in document.get("metrics_from", ())),
            keepalive_s=document.get("keepalive_s", cls.keepalive_s),
            token_ports=(int(first), int(last or first)) if ports else None,
            alone=document.get("alone", cls.alone),
            front_secret=document.get("front_secret"),
        )
