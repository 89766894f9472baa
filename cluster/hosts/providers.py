"""The providers by name."""

from collections.abc import Callable, Sequence

from cluster.hosts.embedded.embedded_provider import EmbeddedProvider
from cluster.hosts.existing import ExistingProvider
from cluster.hosts.kubernetes.kubernetes_provider import KubernetesProvider
from cluster.hosts.provider import Provider, RemoteProvider
from cluster.hosts.slurm.slurm_provider import SlurmProvider
from cluster.hosts.ssh.ssh_provider import SshProvider

PROVIDERS: dict[str, type[Provider]] = {"embedded": EmbeddedProvider, "existing": ExistingProvider}
"""Those of nodes of which the machine is one that `up` is called on."""
REMOTE_PROVIDERS: dict[str, Callable[[Sequence[str]], RemoteProvider]] = {
    "ssh": SshProvider,
    "slurm": SlurmProvider,
    "kubernetes": KubernetesProvider,
}
"""Those of nodes that are elsewhere."""
