"""Clusters that start, break, and are taken down, beside one that goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.errors import ShoalError
from cluster.hosts.embedded.identity import Identity, read_identity, write_identity
from cluster.state.connection import require_record
from cluster.state.health import wait_until
from cluster.state.record import read_record
from cluster.state.state_directory import require_private, state_directory
from tests.clusters import (
    LiveCluster,
    alive,
    caller_environment,
    leftovers,
    live,
    marked_processes,
    processes_of,
    shoal,
    shoal_command,
    unique_name,
    up,
    write_config,
)

ONE_NODE = ("nodes: [{name: head, cpus: 1}]", "storage: ./storage")
COUNT_NODES = "import ray; ray.init(namespace='shoal', log_to_driver=False); print(len(ray.nodes()))"
COUNT_NODES_FROM_A_NODE = """
import ray
from ray.util.state import list_nodes

ray.init(log_to_driver=False)
print(ray.get(ray.remote(lambda: len(list_nodes())).options(num_cpus=0).remote()))
"""
JOIN_EACH = """
from cluster.state.connection import connect, disconnect, read_record
for name in {names}:
    connect(read_record(name))
    import ray
    print(len(ray.nodes()))
    disconnect()
"""


@contextmanager
def starting(path: Path) -> Iterator[subprocess.Popen[str]]:
    """`shoal up` as a process of its own."""
    process = subprocess.Popen(
        shoal_command("up", "-f", str(path)), env=caller_environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def taken_down(path: Path) -> Iterator[None]:
    """Whatever the test does, the cluster of the file is down at its end."""
    try:
        yield
    finally:
        done = shoal("down", "-f", str(path))
        assert done.returncode == 0, done.stderr


def half_way(name: str) -> Identity:
    """The identity of a cluster whose GCS is there, and whose start has not ended."""

    def has_gcs() -> bool:
        identity = read_identity(name)
        return identity is not None and bool(servers(identity.cluster_id, "gcs_server"))

    assert wait_until(has_gcs, 60)
    assert read_record(name) is None
    identity = read_identity(name)
    assert identity is not None
    return identity


def servers(cluster_id: str, *names: str) -> list[psutil.Process]:
    """The cluster's processes that run one of these programs of Ray."""
    return [process for process in marked_processes(cluster_id) if process.info["name"] in names]


def files_of(name: str) -> list[Path]:
    directory = state_directory(name)
    return [path for path in (directory, directory.with_name(f".{name}.lock")) if path.exists()]


def test_an_up_that_was_killed_half_way_is_cleaned_up_by_down(tmp_path: Path) -> None:
    name = unique_name()
    path = write_config(tmp_path, name, *ONE_NODE)
    with starting(path) as process:
        identity = half_way(name)
        process.kill()
        process.wait()
        assert marked_processes(identity.cluster_id)
        with pytest.raises(ShoalError, match=f"cluster {name} is not up: it is being started, or"):
            require_record(name)
    done = shoal("down", "-f", str(path))
    assert (done.returncode, done.stdout) == (0, f"cluster {name} is down\n"), done.stderr
    assert marked_processes(identity.cluster_id) == []
    assert files_of(name) == []


def test_a_cluster_of_another_machine_with_the_same_home_is_left_alone(tmp_path: Path) -> None:
    name = unique_name()
    path = write_config(tmp_path, name, *ONE_NODE)
    require_private(state_directory(name))
    write_identity(Identity(name, "1", str(path), "127.1.2", "127.0.0.1", 1, "127.0.0.1", 2, machine="gpu-7"))
    try:
        for command in ("up", "down"):
            done = shoal(command, "-f", str(path))
            assert done.returncode == 2
            assert f"cluster {name} was started on gpu-7, whose home is this machine's too" in done.stderr
        assert read_identity(name) is not None
    finally:
        for file in files_of(name):
            shutil.rmtree(file) if file.is_dir() else file.unlink()


def test_an_interrupted_up_leaves_nothing(tmp_path: Path) -> None:
    name = unique_name()
    path = write_config(tmp_path, name, *ONE_NODE)
    with taken_down(path), starting(path) as process:
        identity = half_way(name)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert marked_processes(identity.cluster_id) == []
        assert files_of(name) == []


@pytest.mark.slow
def test_a_node_that_does_not_start_is_told_with_its_log_and_nothing_is_left(tmp_path: Path) -> None:
    name = unique_name()
    path = write_config(tmp_path, name, *ONE_NODE)
    with taken_down(path):
        done = shoal("up", "-f", str(path), RAY_OVERRIDE_RESOURCES="no JSON")
        assert done.returncode == 1
        assert "node head (127." in done.stderr
        assert "did not start (exit code 1); it said last:" in done.stderr
        assert "JSONDecodeError" in done.stderr
        assert files_of(name) == []


@pytest.mark.slow
def test_a_cluster_beside_another_through_its_whole_life(
    running_cluster: LiveCluster, tmp_path: Path
) -> None:
    """One story, because a start costs seconds: two `up` at once, side by side, head stopped, head killed,
    up, down."""
    name = unique_name()
    path = write_config(tmp_path, name, *ONE_NODE)
    with taken_down(path):
        with starting(path) as first, starting(path) as second:
            told = [process.communicate(timeout=120)[1] for process in (first, second)]
            assert [first.returncode, second.returncode] == [0, 0], told
        assert sum(f"cluster {name} is up already" in each for each in told) == 1
        one = live(path, name)

        # Side by side: addresses of their own, and each answers as itself.
        assert one.record.head_ip.rpartition(".")[0] != running_cluster.record.head_ip.rpartition(".")[0]
        assert one.python(COUNT_NODES).stdout.strip() == "1"
        assert running_cluster.python(COUNT_NODES).stdout.strip() == "3"
        for cluster, nodes in ((one, "1"), (running_cluster, "3")):
            asked = cluster.python(COUNT_NODES_FROM_A_NODE)
            assert asked.stdout.strip() == nodes, asked.stderr

        # One program may join one after the other, and come back, though their tokens differ.
        names = [name, running_cluster.record.name, name]
        done = one.python(JOIN_EACH.format(names=names))
        assert done.stdout.split() == ["1", "3", "1"], done.stderr

        # The head is stopped for a while: `up` does not take it for dead.
        (control_store,) = servers(one.record.cluster_id, "gcs_server")
        control_store.suspend()
        try:
            done = shoal("up", "-f", str(path))
        finally:
            control_store.resume()
        assert done.returncode == 1
        assert f"the head of cluster {name} is there and does not answer: is this machine over" in done.stderr
        assert live(path, name).record == one.record
        assert one.python(COUNT_NODES).stdout.strip() == "1"

        # The head dies: told soon, and `up` starts again under a new identity with nothing left of the old.
        first_life = processes_of(one.record)
        for process in servers(one.record.cluster_id, "gcs_server", "raylet"):
            process.kill()
        start = time.monotonic()
        done = one.shoal("status")
        assert time.monotonic() - start < 10
        assert (done.returncode, done.stdout) == (1, "")
        assert f"cluster {name} is not up" in done.stderr
        assert "Traceback" not in done.stderr
        again = up(path, name)
        assert again.record.cluster_id != one.record.cluster_id
        assert [process.info for process in alive(first_life)] == []

        # Down takes what was started and no other: not a program of the same user whose shell points at
        # the cluster, not the cluster beside it.
        before = {process.pid for process in marked_processes(running_cluster.record.cluster_id)}
        bystander = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", "raylet", again.record.head_ip],
            env=again.environment,
        )
        try:
            start = time.monotonic()
            done = again.shoal("down")
            assert (done.returncode, done.stdout) == (0, f"cluster {name} is down\n"), done.stderr
            assert time.monotonic() - start < 10
            assert leftovers(again.record) == {}
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()
        assert running_cluster.python(COUNT_NODES).stdout.strip() == "3"
        after = {process.pid for process in marked_processes(running_cluster.record.cluster_id)}
        assert before <= after


@pytest.mark.slow
@pytest.mark.parametrize("key", ["dashboard", "gateway"])
def test_a_configured_port_that_is_taken_starts_nothing(
    running_cluster: LiveCluster, tmp_path: Path, key: str
) -> None:
    host, port = running_cluster.record.head_ip, running_cluster.record.gateway_port
    if key == "dashboard":
        port = int(running_cluster.record.dashboard_url.rpartition(":")[2])
    name = unique_name()
    path = write_config(tmp_path, name, *ONE_NODE, f"{key}: {{host: {host}, port: {port}}}")
    done = shoal("up", "-f", str(path))
    assert done.returncode == 2, done.stderr
    assert f"cluster.{key}.port: {port} on {host} " in done.stderr
    assert files_of(name) == []
