"""The config of commands on a head that Shoal has started Ray on: to them the cluster is one that exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.sections.cluster import ClusterConfig, EndpointConfig

_OF_STARTING = ("nodes", "ssh", "slurm", "dashboard")
"""The keys that say how nodes are started."""
_SERVERS = ("gateway", "api", "serve_proxy")


def wanted_servers(cluster: ClusterConfig) -> dict[str, tuple[str | None, int | None]]:
    """Host and port that a config names for each server of the head."""
    sections: dict[str, EndpointConfig] = {key: getattr(cluster, key) for key in (*_SERVERS, "dashboard")}
    return {key: (section.host, section.port) for key, section in sections.items()}


def section_on_head(
    cluster: ClusterConfig, gcs_address: str, ports: Mapping[str, int], env: Mapping[str, str]
) -> dict[str, Any]:
    """The section `cluster` of that config.

    Args:
        cluster: the section that the nodes were started from.
        ports: those of the head's servers.
        env: the variables of `cluster.env` with their values.
    """
    section = cluster.model_dump(mode="json", exclude_unset=True)
    for key in _OF_STARTING:
        section.pop(key, None)
    for key in _SERVERS:
        section[key] = {**section.get(key, {}), "port": ports[key]}
    return {
        **section,
        "name": cluster.name,
        "provider": "existing",
        "address": gcs_address,
        "env": dict(env),
    }
