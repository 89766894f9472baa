"""Where nodes come from; one class a provider."""

from cluster.hosts.embedded.embedded_provider import EmbeddedProvider
from cluster.hosts.provider import Provider, Started, Tell

PROVIDERS: dict[str, type[Provider]] = {"embedded": EmbeddedProvider}

__all__ = ["PROVIDERS", "EmbeddedProvider", "Provider", "Started", "Tell"]
