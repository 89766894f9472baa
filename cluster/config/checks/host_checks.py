"""What is wrong with where a cluster's nodes come from: hosts are named once, and each provider's keys are
for that provider."""

from __future__ import annotations

from cluster.config.checks.ground import MistakeReport
from cluster.config.sections.cluster import ClusterConfig, NodeConfig
from cluster.config.sections.slurm import SlurmConfig, seconds_of
from cluster.config.sections.ssh import SshConfig

_SLURM_EARLY_S = 60
"""sbatch(1) of --signal: so long before the time that was asked for it may come."""
_OF_HOSTS = ("host", "hosts", "user", "port")
"""The keys of a node that only `ssh` has."""


def check_hosts(cluster: ClusterConfig, report: MistakeReport) -> None:
    """Report every mistake."""
    if cluster.provider != "slurm" and cluster.slurm != SlurmConfig():
        report("slurm", None, "is for `provider: slurm`", "provider")
    if cluster.provider == "slurm":
        _check_slurm(cluster, report)
    if cluster.provider == "ssh":
        _check_named(cluster, report)
        return
    message = "is for `provider: ssh`"
    if cluster.ssh != SshConfig():
        report("ssh", None, message, "provider")
    for index, kind in enumerate(cluster.nodes):
        for key in _OF_HOSTS:
            if (value := getattr(kind, key)) is not None:
                report(f"nodes.{index}.{key}", value, message, "provider")


def _check_slurm(cluster: ClusterConfig, report: MistakeReport) -> None:
    asked = cluster.slurm
    if "nodes" in cluster.model_fields_set:
        report("nodes", None, "are those that Slurm gives: `slurm.nodes` says how many", "provider")
    limit_s = None if asked.time is None else seconds_of(asked.time)
    if limit_s is not None and limit_s < asked.notice_s + 2 * _SLURM_EARLY_S:
        message = (
            f"leaves no time to work: the notice comes {asked.notice_s} s before its end (slurm.notice_s),"
            f" and Slurm may send it {_SLURM_EARLY_S} s earlier"
        )
        report("slurm.time", asked.time, message, "slurm.notice_s")


def _check_named(cluster: ClusterConfig, report: MistakeReport) -> None:
    if "nodes" not in cluster.model_fields_set:
        report("nodes", None, "has to name the hosts (`host`, or `hosts`) with `provider: ssh`", "provider")
        return
    owners: dict[tuple[str, int | None], str] = {}
    for index, kind in enumerate(cluster.nodes):
        if problem := _naming_problem(kind):
            report(f"nodes.{index}", None, f"{kind.name} {problem}", "provider")
            continue
        for name, host in zip(kind.names(), kind.host_names(), strict=True):
            first = owners.setdefault((host, kind.port), name)
            if first != name:
                key = "host" if kind.host is not None else "hosts"
                report(f"nodes.{index}.{key}", host, f"{host} is the node {first} already")


def _naming_problem(kind: NodeConfig) -> str | None:
    if kind.host is not None and kind.hosts is not None:
        return "has both `host` and `hosts`"
    if kind.host is None and kind.hosts is None:
        return "needs `host`, or `hosts`, with `provider: ssh`"
    if kind.count != 1:
        return "cannot have a `count`: each host is one node"
    return None
