"""Where nodes come from; one class a provider."""

from cluster.hosts.embedded.embedded_provider import EmbeddedProvider
from cluster.hosts.existing import ExistingProvider
from cluster.hosts.provider import Provider, Started, Tell

PROVIDERS: dict[str, type[Provider]] = {"embedded": EmbeddedProvider, "existing": ExistingProvider}

__all__ = ["PROVIDERS", "EmbeddedProvider", "ExistingProvider", "Provider", "Started", "Tell"]
