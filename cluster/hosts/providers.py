"""The providers by name."""

from cluster.hosts.embedded.embedded_provider import EmbeddedProvider
from cluster.hosts.existing import ExistingProvider
from cluster.hosts.provider import Provider
from cluster.hosts.ssh.ssh_provider import SshProvider

PROVIDERS: dict[str, type[Provider]] = {"embedded": EmbeddedProvider, "existing": ExistingProvider}
"""Those of nodes of which the machine is one that `up` is called on."""
REMOTE_PROVIDERS = {"ssh": SshProvider}
"""Those of nodes that are elsewhere."""
