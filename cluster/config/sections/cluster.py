"""The `cluster` section: nodes, storage, sharing and where our own servers listen."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from cluster.config.sections.kubernetes import KubernetesConfig
from cluster.config.sections.section import Argument, Name, Section, VariableName
from cluster.config.sections.slurm import SlurmConfig
from cluster.config.sections.ssh import SshConfig

MAX_NODE_ENTRIES = 1000
MAX_GATEWAYS = 1000
LEAST_KEEPALIVE_S = 0.1


def _host(value: str) -> str:
    if re.fullmatch(r"[^\s@/-][^\s@/]*", value) is None:
        raise ValueError(
            f"should be what a host is called, its address, or a name of ~/.ssh/config, was {value!r}"
        )
    return value


HostName = Annotated[str, AfterValidator(_host)]


class NodeConfig(Section):
    """One kind of node; `count` of them are started."""

    name: Name
    """Name of the node; with `count` above 1 the nodes are called NAME-1, NAME-2, …"""
    count: int = Field(default=1, ge=1, le=200)
    """How many nodes of this kind."""
    cpus: int = Field(default=1, ge=0)
    """Logical CPUs that Ray may hand out on each. Default with `ssh`: as many as the host has."""
    gpus: int = Field(default=0, ge=0)
    """GPUs that Ray may hand out on each. Default with `ssh`: those that Ray finds there."""
    accelerator: str | None = None
    """Kind of accelerator, for example H100-SXM."""
    host: HostName | None = None
    """With `ssh`: the host that is the node, as OpenSSH's client is to call it."""
    hosts: Annotated[tuple[HostName, ...], Field(strict=False, min_length=1, max_length=1000)] | None = None
    """With `ssh`, instead of `host`: several hosts of this kind; the nodes are called NAME-1, NAME-2, …"""
    user: Argument | None = Field(default=None, min_length=1)
    """With `ssh`: who logs in there. Default: ssh.user."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """With `ssh`: where sshd listens there. Default: as OpenSSH has it."""

    def names(self) -> list[str]:
        """The names of the single nodes."""
        count = self.count if self.hosts is None else len(self.hosts)
        if count == 1:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(1, count + 1)]

    def host_names(self) -> list[str]:
        """What the hosts of the single nodes are called; none where no host is named."""
        return [self.host] if self.host is not None else list(self.hosts or ())


class SharingConfig(Section):
    """Who gets devices first, and how long a tenant may take to give them back."""

    priority: Literal["serving", "training"] = "serving"
    """The tenant whose wants come first, once every minimum is met."""
    reclaim_grace_s: float = Field(default=30.0, ge=0)
    """Seconds a tenant has to leave a device that was taken from its grant."""
    patience_s: float = Field(default=60.0, ge=0)
    """Seconds that a minimum waits before nodes are kept clear of other starts, so that its turn comes."""
    settle_s: float = Field(default=10.0, ge=0)
    """Least seconds between two changes of a training job's workers for the sake of wants; what serving or a
    minimum needs is not held up. Serving has delays of its own (autoscale)."""
    avoid_after: int = Field(default=3, ge=0)
    """Failures of jobs within an hour that are a node's, after which nothing starts there for a while unless
    a minimum has no other place; 0 avoids none."""


class EveryNodeConfig(Section):
    """What every node keeps for the next job and the next replica."""

    parked_gib: float | None = Field(default=None, ge=0)
    """GiB of a node's memory that engines may take which had to give their devices up: they keep their
    weights, and answer again seconds sooner than one that loads them. Where they take more, the oldest goes.
    0 keeps none. Default: a tenth of the node's memory."""


class EndpointConfig(Section):
    """Where one server of ours listens."""

    host: str | None = None
    """Address to bind. Default: the cluster's own loopback address, reachable from this machine only; with
    other providers than `embedded`, the gateway's is that of the head where it has keys, and the head's
    loopback where not; with `slurm` the dashboard's is that of the head."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port to bind. Default: the usual one, or the next free one where that is taken."""


def _ports(value: object) -> str:
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(value), re.ASCII)
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]) <= 65535:
        raise ValueError(
            f"should be a port, or two as A-B with the lower one first (1 to 65535), was {value!r}"
        )
    return str(value)


def _origin(value: str) -> str:
    if re.fullmatch(r"\*|https?://[^/\s]+", value) is None:
        raise ValueError(f'should be "*" or an origin (https://HOST, https://HOST:PORT), was {value!r}')
    return value


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError:
        raise ValueError(
            f"should be an IP address, or a network as ADDRESS/BITS (10.0.0.0/8), was {value!r}"
        ) from None
    return value


def _gateway_count(value: object) -> int | Literal["all"]:
    if value == "all":
        return "all"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_GATEWAYS:
        return value
    raise ValueError(f'should be "all", or a number from 1 to {MAX_GATEWAYS}, was {value!r}')


def _pause(value: float) -> float:
    if 0 < value < LEAST_KEEPALIVE_S:
        raise ValueError(f"should be 0 (never) or at least {LEAST_KEEPALIVE_S}, was {value:g}")
    return value


Ports = Annotated[str, BeforeValidator(_ports), WithJsonSchema({"type": ["string", "integer"]})]
Origin = Annotated[str, AfterValidator(_origin)]
GatewayCount = Annotated[
    int | Literal["all"],
    PlainValidator(_gateway_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_GATEWAYS}, {"const": "all"}]}),
]
Network = Annotated[str, AfterValidator(_network)]


class GatewayConfig(EndpointConfig):
    """Where the OpenAI-compatible endpoint listens, how many gateways answer there, and who may use it."""

    count: GatewayCount = 1
    """Gateways, at most one a node: that of the head, and others at the addresses of their nodes. `all`: one
    on every node."""
    front: Literal["haproxy", "none"] = "haproxy"
    """What stands in front of the gateways, at this section's host and port: `haproxy`, which bounds clients
    that are slow or many, and sends requests to the gateways that are there. `none`: the site's own load
    balancer; each gateway is reached at the address of its node."""
    certificate: str | None = Field(default=None, min_length=1)
    """Of the front: file on the head (relative to the config file) with the certificate chain in PEM; it is
    https then, with HTTP/2."""
    private_key: str | None = Field(default=None, min_length=1)
    """Of the front: file on the head with the key of that certificate, in PEM."""
    node_port: int | None = Field(default=None, ge=1, le=65535)
    """Behind a front: port of each gateway at its node, or the next one that is free. Default: any."""
    address_connections: int | None = Field(default=None, ge=1)
    """Of the front: connections that one client address may have. Default: any number, as long as few are in
    use."""
    address_requests: int | None = Field(default=None, ge=1)
    """Of the front: requests that one client address may send in ten seconds. Default: any number."""
    keys: str | None = Field(default=None, min_length=1)
    """File (relative to the config file), or environment variable as `env:NAME`, with the API keys: a YAML or
    JSON list of {sha256, tenant, apps, requests_per_minute, tokens_per_minute, metrics}; `shoal key` writes
    entries. Without keys the gateway listens on loopback only."""
    metrics_from: list[Network] = Field(default_factory=list)
    """Addresses (10.0.0.5) and networks (10.0.0.0/8) that may read /metrics and /load without a key, where
    the gateway has keys or a front. Behind a proxy of others every request comes from the proxy's address."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """What happens to a request with a field that Shoal does not know and that asks for something, or with a
    tool that only OpenAI's or Anthropic's own servers have."""
    token_ports: Ports | None = None
    """Ports (A or A-B) of a gateway's node at which replicas on other nodes send tokens. Default: any."""
    keepalive_s: Annotated[float, AfterValidator(_pause)] = Field(default=15.0, ge=0)
    """Seconds without a token after which a stream is sent a comment, so that no proxy takes it for dead; 0
    sends none."""
    cors: list[Origin] = Field(default_factory=list)
    """Origins whose pages may ask the gateway from a browser (https://example.org), or "*" for all."""

    @property
    def has_front(self) -> bool:
        """Whether clients come through a front of ours."""
        return self.front != "none"


class ServeProxyConfig(EndpointConfig):
    """Where Ray Serve's own HTTP proxy listens, on the head: it answers for Serve applications that are not
    Shoal's (`serve run`, `serve deploy`)."""

    host: str | None = None
    """Loopback address to bind. Default: one of the cluster's own, which no node and no other cluster has."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port to bind. Default: 8000, as Serve's own tools have it; with another one `up` starts Serve, since
    those tools can only be told the address."""


def _not_empty(nodes: tuple[NodeConfig, ...]) -> tuple[NodeConfig, ...]:
    if not nodes:
        raise ValueError(f"should be a list of 1 to {MAX_NODE_ENTRIES} entries, was an empty list")
    return nodes


class ApiConfig(EndpointConfig):
    """Where the control API listens, which the `shoal` command asks; every request needs a token."""

    host: str | None = None
    """Address to bind on the head. Default: a loopback address, reachable from the head only; with `slurm`
    the head's own, since that is how it is reached."""
    certificate: str | None = Field(default=None, min_length=1)
    """File on the head (relative to the config file) with the certificate chain in PEM: it is https then."""
    private_key: str | None = Field(default=None, min_length=1)
    """File on the head with the key of that certificate, in PEM."""


# pydantic's own min_length counts only the entries without mistakes, and then tells of the length instead
# of those mistakes.
Nodes = Annotated[
    tuple[NodeConfig, ...],
    Field(strict=False, max_length=MAX_NODE_ENTRIES, json_schema_extra={"minItems": 1}),
    AfterValidator(_not_empty),
]


def _ray_address(value: str) -> str:
    if value == "auto" or re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):\d{1,5}", value) is not None:
        return value
    raise ValueError(f'should be "auto" or HOST:PORT of Ray\'s control store (6379 usually), was {value!r}')


class ClusterConfig(Section):
    """The nodes, the storage they share, and how training and serving share the nodes."""

    name: Name = "shoal"
    """Name of the cluster; clusters of different names run side by side on one machine."""
    provider: Literal["embedded", "existing", "ssh", "slurm", "kubernetes"] = "embedded"
    """Where the nodes come from: `embedded` starts them as processes of this machine; `existing` uses a Ray
    cluster that somebody else has started; `ssh` starts Ray on hosts that OpenSSH's client reaches; `slurm`
    on those of a batch job; `kubernetes` in pods, through KubeRay."""
    address: Annotated[str, AfterValidator(_ray_address)] | None = None
    """With `existing`: Ray's address of the cluster (HOST:PORT of its control store), or `auto`: the one that
    this machine is a node of, or that RAY_ADDRESS names. Default: auto."""
    nodes: Nodes = (
        NodeConfig(name="head", cpus=0),
        NodeConfig(name="worker", count=2, cpus=2),
    )
    """The nodes; the first is the head. With `existing` they are what Ray says: what stands here is only what
    the file is checked against; with `slurm` those that it gives."""
    storage: str = Field(default="./shoal-storage", min_length=1)
    """Where jobs and models are kept: a path (relative to the config file; with `ssh` from the root, and one
    that all hosts have mounted) or any URI of pyarrow.fs."""
    env: dict[VariableName, Argument | None] = Field(default={})
    """Environment variables of everything that runs on the nodes (NCCL_SOCKET_IFNAME, HF_HOME). null passes
    on the value that a variable has where `up` is called. Of that shell only what finds programs, homes,
    proxies and credentials of object stores comes along by itself, and what begins with RAY_ or VLLM_."""
    ssh: SshConfig = SshConfig()
    """With `ssh`: how the hosts are reached."""
    slurm: SlurmConfig = SlurmConfig()
    """With `slurm`: what is asked for."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """With `kubernetes`: what is asked for."""
    sharing: SharingConfig = SharingConfig()
    node: EveryNodeConfig = EveryNodeConfig()
    """What every node keeps."""
    gateway: GatewayConfig = GatewayConfig()
    """The OpenAI-compatible endpoint (usual port 8000)."""
    api: ApiConfig = ApiConfig()
    """The control API (usual port 8270)."""
    dashboard: EndpointConfig = EndpointConfig()
    """The Ray dashboard and job API (usual port 8265)."""
    serve_proxy: ServeProxyConfig = ServeProxyConfig()
    """Ray Serve's own HTTP proxy, for Serve applications that are not Shoal's (usual port 8000)."""

    @property
    def known_nodes(self) -> tuple[NodeConfig, ...]:
        """The nodes that jobs and apps are checked against, those too that come when they are asked for; none
        where the file does not say them."""
        if self.provider == "slurm":
            return self._asked_of_slurm()
        if self.provider == "kubernetes" and self.kubernetes.autoscaler is not None:
            most = self.kubernetes.autoscaler.most
            return tuple(
                kind.model_copy(update={"count": most.get(kind.name, kind.count)}) for kind in self.nodes
            )
        if self.provider == "ssh":  # what a node does not say, its host does
            said = all({"cpus", "gpus"} <= kind.model_fields_set for kind in self.nodes)
        else:
            said = self.provider in ("embedded", "kubernetes") or "nodes" in self.model_fields_set
        return self.nodes if said else ()

    def _asked_of_slurm(self) -> tuple[NodeConfig, ...]:
        asked = self.slurm
        if asked.cpus_per_node is None:  # whole nodes, whatever they are
            return ()
        gpus = asked.gpus_per_node or 0
        return (NodeConfig(name="node", count=asked.nodes, cpus=asked.cpus_per_node, gpus=gpus),)

    @property
    def node_count(self) -> int | None:
        """How many nodes there are to be; None where others say that."""
        if self.provider == "slurm":
            return self.slurm.nodes
        return len(self.node_shapes()) if self.known_nodes or self.provider == "ssh" else None

    @property
    def seen_here(self) -> bool:
        """Whether its nodes have the files of the machine that has the config file."""
        return self.provider not in ("ssh", "kubernetes")

    def node_shapes(self) -> list[tuple[str, NodeConfig]]:
        """Every single node as (name, its kind), the head first."""
        return [(name, kind) for kind in self.nodes for name in kind.names()]
