"""What is wrong across sections: whether jobs and apps fit the nodes, whether sizes and paths agree."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

from cluster.config.checks.app_checks import check_app
from cluster.config.checks.ground import Ground, MistakeReport, local_path
from cluster.config.checks.host_checks import check_hosts
from cluster.config.checks.job_checks import check_job
from cluster.config.checks.kubernetes_checks import check_kubernetes
from cluster.config.reading.api_keys import ENVIRONMENT, load_keys
from cluster.config.reading.positions import KeyPath, YamlDocument
from cluster.config.sections.cluster import (
    ApiConfig,
    ClusterConfig,
    EndpointConfig,
    GatewayConfig,
    NodeConfig,
)
from cluster.config.sections.root import ShoalConfig
from cluster.errors import Mistake, RequestError
from cluster.loopback import NAME, is_own, own_address

_NODES_FILES = re.compile(
    r"train_jobs\..*\.(data\.(source|held_out_source|tokenizer)|model\.directory)|serve_apps\..*\.model"
)
"""Keys that name what the nodes have."""
_ANY_HOST = frozenset(("0.0.0.0", "::", "[::]"))
_NAMES = {
    "gateway": "the gateway",
    "api": "the control API",
    "dashboard": "the dashboard",
    "serve_proxy": "Serve's proxy",
}


def find_mistakes(
    config: ShoalConfig,
    document: YamlDocument,
    base: Path,
    broken: Collection[KeyPath] = (),
    kinds: tuple[NodeConfig, ...] | None = None,
) -> list[Mistake]:
    """Every mistake that only shows when sections are seen together, with its place in the file.

    `config` has its paths made absolute from `base` (see `resolve_paths`). `broken` are the key paths whose
    values were wrong in themselves, with defaults in their stead: nothing is said that follows from those.
    `kinds` are the nodes that are there, where others than the file say so.
    """
    mistakes: list[Mistake] = []
    report = MistakeReport(document, broken, mistakes)
    ground = Ground(config.cluster.known_nodes if kinds is None else kinds, base)
    cluster = report.inside("cluster")
    _check_provider(config.cluster, cluster)
    _check_nodes(config.cluster, cluster)
    if config.cluster.provider == "embedded":  # of other nodes' disks this one knows nothing
        _check_storage(config.cluster, cluster)
    elif not config.cluster.seen_here:
        _check_paths(config.cluster, cluster)
    _check_endpoints(config.cluster, cluster)
    for name, job in config.train_jobs.items():
        own = report.inside("train_jobs", name)
        check_job(job, ground, own)
        if job.task == "script" and local_path(config.cluster.storage) is None:
            message = "a script writes into directories: it needs a cluster.storage that every node mounts"
            own("task", job.task, message)
    for name, app in config.serve_apps.items():
        check_app(app, config, ground, report.inside("serve_apps", name))
    if config.cluster.seen_here:
        return mistakes
    return [each for each in mistakes if not _NODES_FILES.fullmatch(each.path)]


def _check_provider(cluster: ClusterConfig, report: MistakeReport) -> None:
    if cluster.provider != "existing" and cluster.address is not None:
        message = "is for `provider: existing`; Shoal starts this cluster itself, and chooses its address"
        report("address", cluster.address, message, "provider")
    check_hosts(cluster, report)
    check_kubernetes(cluster, report)
    if cluster.provider == "existing" and cluster.dashboard != EndpointConfig():
        message = "cannot be chosen: the dashboard of an existing cluster is where Ray was told to have it"
        report("dashboard", None, message, "provider")


def _check_paths(cluster: ClusterConfig, report: MistakeReport) -> None:
    """Of the head's files this machine knows nothing, but where they cannot be."""
    keys = cluster.gateway.keys
    named = {
        "storage": None if local_path(cluster.storage) is None else cluster.storage,
        "gateway.keys": None if keys is None or keys.startswith(ENVIRONMENT) else keys,
        "api.certificate": cluster.api.certificate,
        "api.private_key": cluster.api.private_key,
        "gateway.certificate": cluster.gateway.certificate,
        "gateway.private_key": cluster.gateway.private_key,
    }
    for key, path in named.items():
        if path is not None and not os.path.isabs(path):
            where = "that all hosts have mounted, or a URI" if key == "storage" else "on the head"
            report(key, path, f"should be a path from the root, {where}, was `{path}`", "provider")


def _check_nodes(cluster: ClusterConfig, report: MistakeReport) -> None:
    owners: dict[str, int] = {}
    for index, kind in enumerate(cluster.nodes):
        clashes = [name for name in kind.names() if name in owners]
        if clashes:
            first = owners[clashes[0]]
            message = (
                f"two nodes are called `{clashes[0]}`: entries {first} and {index} of the list"
                " (an entry with `count` above 1 makes NAME-1, NAME-2, …)"
            )
            report(f"nodes.{index}.name", kind.name, message)
        for name in kind.names():
            owners.setdefault(name, index)


def _check_endpoints(cluster: ClusterConfig, report: MistakeReport) -> None:
    gateway, dashboard = cluster.gateway, cluster.dashboard
    if gateway.keys is not None:
        if cluster.seen_here or gateway.keys.startswith(ENVIRONMENT):
            _check_keys(gateway.keys, report)
    elif gateway.host is not None and not is_own(gateway.host):
        message = f"should be a loopback address unless gateway.keys names API keys, was `{gateway.host}`"
        report("gateway.host", gateway.host, message, "gateway.keys")
    proxy = cluster.serve_proxy
    if proxy.host is not None and not is_own(proxy.host):
        message = f"should be a loopback address: Serve's proxy asks nobody for a key, was `{proxy.host}`"
        report("serve_proxy.host", proxy.host, message)
    named = {"gateway": gateway, "api": cluster.api, "dashboard": dashboard, "serve_proxy": proxy}
    for key, other in itertools.combinations(named, 2):
        if _clash(key, named[key], other, named[other]):
            port, words = named[other].port, f"{_NAMES[key]} and {_NAMES[other]}"
            message = f"{words} cannot both listen on port {port} of one address"
            report(f"{other}.port", port, message, key, other)
    _check_certificate("api", cluster.api, report)
    _check_certificate("gateway", gateway, report)
    _check_front(cluster, report)
    tokens = gateway.token_ports
    if tokens is not None:
        first, _, last = tokens.partition("-")
        for key, each in named.items():
            at_node = key != "serve_proxy" and (each.host is None or each.host in _ANY_HOST)
            if at_node and each.port is not None and int(first) <= each.port <= int(last or first):
                message = f"holds port {each.port}, where {_NAMES[key]} listens"
                report("gateway.token_ports", tokens, message, key)


def _check_keys(source: str, report: MistakeReport) -> None:
    try:
        load_keys(source)
    except RequestError as error:
        report("gateway.keys", source, str(error))


def _check_certificate(key: str, server: ApiConfig | GatewayConfig, report: MistakeReport) -> None:
    if (server.certificate is None) != (server.private_key is None):
        lacks = "private_key" if server.private_key is None else "certificate"
        message = f"is needed beside `{'certificate' if lacks == 'private_key' else 'private_key'}`"
        report(f"{key}.{lacks}", None, message, key)


def _check_front(cluster: ClusterConfig, report: MistakeReport) -> None:
    """Several gateways are reached over the network, unless all nodes are processes of one machine."""
    gateway = cluster.gateway
    if not gateway.has_front:
        for key in ("certificate", "private_key", "node_port", "address_connections", "address_requests"):
            if getattr(gateway, key) is not None:
                message = "needs a front, which carries it out: `gateway.front: haproxy`"
                report(f"gateway.{key}", getattr(gateway, key), message, "gateway.front")
        if gateway.count != 1 and gateway.keys is None and cluster.provider != "embedded":
            message = (
                "needs `gateway.keys`, or `gateway.front`: gateways on other nodes than the head are reached"
                " over the network, where everybody could ask them"
            )
            report("gateway.count", gateway.count, message, "gateway.keys")


def _clash(key: str, one: EndpointConfig, other_key: str, other: EndpointConfig) -> bool:
    """Whether two servers would listen at one port of one address."""
    if one.port is None or one.port != other.port:
        return False
    hosts = {_host(one), _host(other)}
    if len(hosts) == 1:
        # Without a host the proxy has an address of its own, and the others that of the head.
        return None not in hosts or "serve_proxy" not in (key, other_key)
    # The proxy shares its port with a gateway on every address: connections to its own address are its own.
    return bool(hosts & _ANY_HOST) and {key, other_key} != {"gateway", "serve_proxy"}


def _host(endpoint: EndpointConfig) -> str | None:
    return own_address() if endpoint.host == NAME else endpoint.host


def _check_storage(cluster: ClusterConfig, report: MistakeReport) -> None:
    directory = local_path(cluster.storage)
    problem = None if directory is None else storage_problem(directory)
    if problem is not None:
        report("storage", cluster.storage, f"`{directory}` cannot be written: {problem}")


def storage_problem(directory: Path) -> str | None:
    """Why nothing can be written at or under `directory`, or None; nothing is left behind."""
    nearest = directory
    try:
        while not os.path.lexists(nearest) and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            return f"`{nearest}` is not a directory"
        # Permissions say nothing of read-only mounts and of /proc, and nothing at all to root: only a real
        # file does. It has no name where the file system can do that, and is gone when it is closed.
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"no file can be made in `{nearest}` ({error.strerror or error})"
