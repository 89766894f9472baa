"""A cluster's beginning and end: nodes, services, the control API; jobs and apps, where its nodes stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from cluster.hosts.provider import RemoteProvider, Started
from cluster.hosts.providers import PROVIDERS, REMOTE_PROVIDERS
from cluster.hosts.ssh.fleet import read_fleet
from cluster.state.connection import ClusterRecord, connect, disconnect, head_is_silent, read_record

COMMAND = ("-m", "infra.cli.main")
"""What runs `shoal`, after the interpreter."""
UP, DOWN = ("up", "--json"), ("down", "--json")
"""What is run on the head where the nodes are elsewhere."""
STOP_TIMEOUT_S = 150.0
_LOOK_S = 0.2


def bring_up(
    cluster: ClusterConfig,
    config_path: Path,
    say: Callable[[str], None],
    *,
    serves: bool,
) -> tuple[Started, dict[str, Any]]:
    """Bring a cluster up, or find it up; and what `shoal status` shows of it.

    Args:
        cluster: its section of the config, paths resolved.
        serves: whether the config has apps; see `ApiServer`.

    Raises:
        ShoalError, RequestError: see `Provider.up` and `RemoteProvider.up`.
    """
    if cluster.provider in REMOTE_PROVIDERS:
        from infra.api.client import renamed

        remote = remote_provider(cluster).up(cluster, config_path, say, UP)
        assert remote.record is not None, "it stays"
        fleet = read_fleet(cluster.name)
        names = {} if fleet is None else fleet.renamed()
        return Started(remote.record, remote.was_up), renamed(remote.document, names)
    from infra.api.cluster_sight import ClusterSight
    from infra.api.server import begin_api
    from train_jobs.driver.submission import Submissions

    provider = PROVIDERS[cluster.provider]()
    started = provider.up(cluster, config_path, say, lambda record: begin_api(record, cluster, serves))
    record = started.record
    connect(record)
    try:
        if started.was_up:
            begin_api(record, cluster, serves)()  # should it be gone
        return started, ClusterSight(record, lambda: Submissions(record)).status(fresh=not started.was_up)
    finally:
        disconnect()


def remote_provider(cluster: ClusterConfig) -> RemoteProvider:
    """That of a cluster whose nodes are elsewhere."""
    return REMOTE_PROVIDERS[cluster.provider](COMMAND)


def take_down(cluster: ClusterConfig, config_path: Path | None, say: Callable[[str], None]) -> bool:
    """Take a cluster down, with all that runs on it; False when there was nothing.

    Raises:
        ShoalError, RequestError: see `Provider.down`; a job did not stop in time.
    """
    if cluster.provider in REMOTE_PROVIDERS:
        return remote_provider(cluster).down(cluster.name, say, DOWN, config_path)
    provider = PROVIDERS[cluster.provider]()
    record = read_record(cluster.name)
    if record is not None and not provider.owns_nodes:
        end_tenants(record, say)
    return provider.down(cluster.name, say, config_path)


def end_tenants(record: ClusterRecord, say: Callable[[str], None]) -> None:
    """Stop every job of Shoal's, which saves before it leaves; end every app, whose requests are finished.

    Nothing happens where the cluster does not answer: nothing of it can be ended.

    Raises:
        ShoalError: a job did not stop in time.
    """
    from infra.api.server import end_api
    from serve_apps.commands import end_serving  # what only some need: a command is to begin at once

    if head_is_silent(record) is not None:
        return
    connect(record)
    try:
        _stop_jobs(record, say)
        end_api()  # it may be about to start Serve
        end_serving(say)
    finally:
        disconnect()


def _stop_jobs(record: ClusterRecord, say: Callable[[str], None]) -> None:
    from cluster.files.storage import Storage
    from train_jobs.driver.submission import Submissions
    from train_jobs.records.job_status import is_running
    from train_jobs.records.listing import summaries

    submissions, storage = Submissions(record), Storage(record.storage)

    def running() -> dict[str, str]:
        statuses = submissions.statuses()
        return {
            summary.job: summary.submission_id
            for summary in summaries(storage)
            if is_running(summary, statuses) and summary.submission_id is not None
        }

    stopped = running()
    for job, submission in stopped.items():
        say(f"stopping {job}")
        submissions.stop(submission)
    deadline, pause = time.monotonic() + STOP_TIMEOUT_S, threading.Event()
    while left := sorted(running().keys() & stopped.keys()):
        if time.monotonic() > deadline:
            raise ShoalError(f"these jobs did not stop within {STOP_TIMEOUT_S:.0f} s: {', '.join(left)}")
        pause.wait(_LOOK_S)
