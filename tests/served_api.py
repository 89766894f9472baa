"""The control API in this process, over parts that tests stand in for; a cluster that is up by its record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import uvicorn

from cluster.config.sections.cluster import ClusterConfig, NodeConfig
from cluster.files.storage import Storage
from cluster.loopback import own_address
from cluster.state.record import ClusterRecord, write_record
from infra.api.access import digest_of, own_token
from infra.api.app import build_api
from infra.api.apps import Apps
from infra.api.audit import AuditLog
from infra.api.batches import Batches
from infra.api.cluster_sight import ClusterSight
from infra.api.control import DIRECTORY, Control
from infra.api.jobs import Jobs
from infra.api.packages import Packages
from infra.api.server import bind
from infra.api.tokens import TokenTable
from train_jobs.driver.submission import Submissions, record_submission

NODES = (NodeConfig(name="worker", count=2, cpus=2),)


class RayJobs:
    """Ray's job API, and a driver that does what it is told when it is submitted."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.stopped: list[str] = []
        self.submitted: list[dict[str, Any]] = []
        self.then: Callable[[Storage, str], None] = lambda storage, job: None
        """What the driver does, in the job's storage."""

    def statuses(self) -> dict[str, str]:
        return self.known

    def status(self, submission_id: str) -> str | None:
        return self.known.get(submission_id)

    def message(self, submission_id: str) -> str:
        return "it died"

    def stop(self, submission_id: str) -> None:
        self.stopped.append(submission_id)

    def submit_package(
        self,
        storage: Storage,
        job: str,
        name: str,
        config: Any,
        submission_id: str,
        package: Any,
        *,
        environment: Mapping[str, str],
    ) -> None:
        files = {path: (package.base / path).read_bytes() for path in package.files}
        self.submitted.append(
            {"job": job, "config": config, "files": files, "environment": dict(environment)}
        )
        record_submission(storage, job, name, config, submission_id)
        self.known.setdefault(submission_id, "RUNNING")
        self.then(storage, job)


def control(storage: Storage, jobs: RayJobs | None = None, **parts: Any) -> Control:
    """Control of a cluster that is nothing but its storage.

    Args:
        parts: what stands in for others of its parts.
    """
    cluster = ClusterConfig.model_validate({"name": "lab", "nodes": [{"name": "worker", "cpus": 2}]})
    submissions = cast("Callable[[], Submissions]", lambda: jobs or RayJobs())
    kept = storage.child(DIRECTORY)
    nowhere = "127.0.0.1:1"
    record = ClusterRecord(
        *(
            "lab",
            "id",
            "",
            "",
            storage.location,
            "127.0.0.1",
            nowhere,
            f"http://{nowhere}",
            "127.0.0.1",
            1,
            None,
        )
    )
    found = Control(
        name="lab",
        record=record,
        storage=storage,
        view=ClusterSight(record, submissions),
        jobs=Jobs(cluster, storage, submissions, lambda: NODES),
        apps=Apps(cluster, lambda: NODES),
        packages=Packages(),
        tokens=TokenTable(kept),
        audit=AuditLog(kept),
        batches=Batches(record, cluster, lambda: NODES),
        keys=f"{storage.location}/keys.yaml",
        submissions=submissions,
    )
    return replace(found, **parts)


@contextmanager
def served(
    control: Control, port: int = 0, certificate: str | None = None, key: str | None = None
) -> Iterator[int]:
    """Serve it at this machine's own address; the port."""
    listener = bind(own_address(), port)
    config = uvicorn.Config(
        build_api(control), log_level="warning", lifespan="off", ssl_certfile=certificate, ssl_keyfile=key
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "it did not start"
        threading.Event().wait(0.01)
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10.0)
        listener.close()


def up_here(name: str, control: Control, port: int) -> ClusterRecord:
    """Let a cluster be up from here, by its record, whose control API is served at the port."""
    record = ClusterRecord(
        name=name,
        cluster_id=f"id of {name}",
        config_path="",
        base_dir="",
        storage=control.storage.location,
        head_ip=own_address(),
        gcs_address=f"{own_address()}:1",
        dashboard_url="",
        gateway_host=own_address(),
        gateway_port=8000,
        token_path=None,
        api_host=own_address(),
        api_port=port,
    )
    control.tokens.trust(digest_of(own_token(record)))
    from cluster.state.state_directory import require_private, state_directory

    require_private(state_directory(name))
    write_record(record)
    return record
