"""All that the control API reaches, in one hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from cluster.config.sections.cluster import ClusterConfig, NodeConfig
from cluster.files.storage import Storage
from cluster.state.connection import ClusterRecord
from infra.api.apps import Apps
from infra.api.audit import AuditLog
from infra.api.batches import Batches
from infra.api.cluster_sight import ClusterSight
from infra.api.jobs import Jobs
from infra.api.packages import Packages
from infra.api.tokens import TokenTable
from infra.tenant_book import TenantBook
from train_jobs.driver.submission import Submissions

DIRECTORY = "control"
"""In the cluster's storage: tokens and the audit log."""


@dataclass(frozen=True)
class Control:
    """What may be seen and done.

    Attributes:
        record: the cluster's, as seen from here.
        keys: where the keys of its gateway are, as the config says it.
    """

    name: str
    record: ClusterRecord
    storage: Storage
    view: ClusterSight
    jobs: Jobs
    apps: Apps
    packages: Packages
    tokens: TokenTable
    audit: AuditLog
    batches: Batches
    keys: str | None
    submissions: Callable[[], Any]


def control_of(record: ClusterRecord, cluster: ClusterConfig) -> Control:
    """That of the cluster that this process has joined.

    Args:
        record: as seen from here.
        cluster: its section of the config, paths resolved.
    """
    storage = Storage(record.storage)
    kept = storage.child(DIRECTORY)

    @cache  # each one asks Ray for its version first
    def submissions() -> Submissions:
        return Submissions(record, joined=True)

    def nodes() -> tuple[NodeConfig, ...]:
        from cluster.sharing.client import BrokerClient
        from cluster.sharing.growth import config_of
        from cluster.state.nodes import kinds_of, node_states

        if cluster.provider == "embedded":
            return cluster.known_nodes
        broker, states = BrokerClient(), node_states()
        if kinds := broker.kinds():  # more of them come when they are asked for
            return (*kinds_of([each for each in states if each.head]), *map(config_of, kinds))
        misfits = broker.misfits()
        return kinds_of([each for each in states if not misfits.get(each.node_id)])

    jobs = Jobs(cluster, storage, submissions, nodes, TenantBook.of_this_cluster())
    return Control(
        name=record.name,
        record=record,
        storage=storage,
        view=ClusterSight(record, submissions, jobs.table),
        jobs=jobs,
        apps=Apps(cluster, nodes),
        packages=Packages(),
        tokens=TokenTable(kept),
        audit=AuditLog(kept),
        batches=Batches(record, cluster, nodes),
        keys=cluster.gateway.keys,
        submissions=submissions,
    )
