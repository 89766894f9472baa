"""What happens when the head dies, with every driver on it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.errors import ShoalError
from cluster.state.connection import connect, disconnect
from infra.lab.bench.own_cluster import OwnCluster, OwnJob
from infra.lab.environment import in_environment
from infra.lab.faults import nodes
from infra.lab.faults.fault_course import resumption, seconds
from infra.lab.faults.laboratory import Laboratory, state_of, wait_between_checkpoints
from infra.lab.faults.scenario import ClusterUse, FaultOutcome, Scenario, Trial
from infra.lab.faults.waiting import wait_for


def lose_head(lab: Laboratory, repeats: int) -> FaultOutcome:
    """Without a control store that outlives it: a clear end, then `shoal up` and `shoal resume`."""
    with lab.own_cluster() as cluster:
        job = cluster.submit("whole")
        trials = [_lose_head(cluster, job) for _ in range(repeats)]
        return FaultOutcome(trials, lab.wrong(job))


def _lose_head(cluster: OwnCluster, job: OwnJob) -> Trial:
    wait_between_checkpoints(job)
    attempt = job.metrics()[-1]["attempt"]
    disconnect()  # Ray ends a process whose cluster is gone
    began = time.time()
    nodes.kill_head(cluster.record)
    wait_for(lambda: job.status() == "failed", "nobody says that the job has failed")
    said = time.time() - began
    cluster.up_again()
    up = time.time() - began
    job.resume()
    went_on = job.until(lambda: resumption(job.metrics(), attempt + 1), "no step was done after `resume`")
    seen = f"`shoal jobs` said failed after {said:.1f} s, `shoal up` was done after {up:.1f} s"
    return Trial(
        went_on.time - began,
        state_of(job, went_on),
        found_s=said,
        repeated=went_on.repeated,
        lost=went_on.lost,
        seen=seen,
    )


def lose_head_with_redis(lab: Laboratory, repeats: int) -> FaultOutcome:
    """With the control store on Redis: workers and broker survive, the job's driver does not."""
    with (
        _redis(lab.directory) as address,
        in_environment({"RAY_REDIS_ADDRESS": address}),
        lab.own_cluster() as cluster,
    ):
        job = cluster.submit("whole")
        trials = [_lose_head_with_redis(cluster, job) for _ in range(repeats)]
        return FaultOutcome(trials, lab.wrong(job))


def _lose_head_with_redis(cluster: OwnCluster, job: OwnJob) -> Trial:
    wait_between_checkpoints(job)
    attempt = job.metrics()[-1]["attempt"]
    disconnect()
    began = time.time()
    nodes.kill_head(cluster.record)
    nodes.start_node(cluster.record, cluster.record.nodes[0].name)
    up = time.time() - began
    wait_for(lambda: _says_failed(job), "nobody says that the job has failed")
    said = time.time() - began
    connect(cluster.record)
    job.resume()
    went_on = job.until(lambda: resumption(job.metrics(), attempt + 1), "no step was done after `resume`")
    after = sum(seconds(line) > began for line in job.metrics() if line["attempt"] == attempt)
    seen = f"the head answered after {up:.1f} s; {after} steps of the old attempt were logged without it"
    return Trial(
        went_on.time - began,
        state_of(job, went_on),
        found_s=said,
        repeated=went_on.repeated,
        lost=went_on.lost,
        seen=seen,
    )


def _says_failed(job: OwnJob) -> bool:
    with suppress(ShoalError):  # the job API takes a moment longer to be back
        return job.status() == "failed"
    return False


@contextmanager
def _redis(directory: Path) -> Iterator[str]:
    """The address of a Redis of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"port": port, "bind": "127.0.0.1", "save": "", "dir": directory}
    command = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    server = subprocess.Popen(["redis-server", *command], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _can_connect(port), "Redis does not answer")
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=20)


def _can_connect(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _no_redis() -> str | None:
    return None if shutil.which("redis-server") else "there is no redis-server on this machine"


SCENARIOS = (
    Scenario(
        "head-lost",
        "SIGKILL of all of the head, without Redis: the job has failed; `shoal up` and `shoal resume`",
        lose_head,
        use=ClusterUse.OWN,
    ),
    Scenario(
        "head-lost-redis",
        "SIGKILL of all of the head, its control store on Redis; the head is started again, `shoal resume`",
        lose_head_with_redis,
        missing=_no_redis,
        use=ClusterUse.OWN,
    ),
)
