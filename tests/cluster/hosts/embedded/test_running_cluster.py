"""A running cluster, seen from outside and through Ray's own tools."""

from __future__ import annotations

import ipaddress
import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.errors import ShoalError
from cluster.state.connection import connect
from cluster.state.record import ClusterRecord
from cluster.state.state_directory import state_directory
from tests.clusters import LiveCluster, caller_environment, marked_processes, shoal, write_config

TOOLS = Path(sys.executable).parent


def test_status_tells_the_nodes_of_the_config(running_cluster: LiveCluster) -> None:
    done = running_cluster.shoal("status", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    urls = {"address", "dashboard_url", "base_url", "storage"}
    assert set(document) == {"name", *urls, "nodes", "leases", "jobs", "apps", "serve"}
    assert document["name"] == running_cluster.record.name
    assert [(node["name"], node["head"], node["resources"].get("CPU", 0)) for node in document["nodes"]] == [
        ("head", True, 0),
        ("worker-1", False, 2),
        ("worker-2", False, 2),
    ]
    assert all(node["alive"] for node in document["nodes"])
    # One fork server for all nodes of a machine.
    memory = [node["memory_by_kind"] for node in document["nodes"]]
    assert sum(each["ForkServer"] > 2**20 for each in memory) == 1
    assert ["Broker" in each for each in memory] == [True, False, False]
    assert "kept ready" in running_cluster.shoal("status").stdout


@pytest.mark.parametrize("asks", ["connect(record); ray.nodes()", "Submissions(record).statuses()"])
def test_a_program_that_has_imported_ray_already_joins_too(running_cluster: LiveCluster, asks: str) -> None:
    """Ray reads when it is imported whether it needs a token at all."""
    program = f"""
import ray
from cluster.state.connection import connect, read_record
from train_jobs.driver.submission import Submissions
record = read_record({running_cluster.record.name!r})
{asks}
print("answered")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=caller_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "answered", done.stdout + done.stderr


@pytest.mark.parametrize("ends", ["disconnect(); assert sys.stdout is before", "pass"])
def test_what_ray_complains_of_is_not_printed_among_a_commands_output(
    running_cluster: LiveCluster, ends: str
) -> None:
    program = f"""
import sys, time
import ray
from ray._private.utils import publish_error_to_driver
from cluster.state.connection import connect, disconnect, read_record
before = sys.stdout
connect(read_record({running_cluster.record.name!r}))
complaint = "the machine is slow today, " * 3
for _ in range(20):  # Ray listens a moment after it has joined
    publish_error_to_driver("worker_pool", complaint, ray._private.worker.global_worker.gcs_client)
    time.sleep(0.1)
print("document", flush=True)
{ends}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=caller_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "document\n"), done.stderr
    assert "the machine is slow today" in done.stderr


def test_used_resources_are_told_by_node_and_add_up_to_rays_own_total(running_cluster: LiveCluster) -> None:
    program = f"""
import json, ray
from cluster.state.connection import connect, read_record
from cluster.state.nodes import node_states
from cluster.state.health import wait_until
connect(read_record({running_cluster.record.name!r}))
@ray.remote(num_cpus=1, label_selector={{"shoal.io/node": "worker-2"}})
class Holder:
    def ready(self): return True
holder = Holder.remote()
ray.get(holder.ready.remote(), timeout=60)
def agree():
    used = {{state.name: state.used.get("CPU", 0) for state in node_states()}}
    total = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0)
    return used == {{"head": 0, "worker-1": 0, "worker-2": 1}} and total == 1
print(json.dumps(wait_until(agree, 20)))
"""
    done = running_cluster.python(program)
    assert done.stdout.strip() == "true", done.stdout + done.stderr


def test_up_again_says_that_it_is_up_and_changes_nothing(running_cluster: LiveCluster) -> None:
    before = {process.pid for process in marked_processes(running_cluster.record.cluster_id)}
    done = running_cluster.shoal("up", "--json")
    assert done.returncode == 0, done.stderr
    assert f"cluster {running_cluster.record.name} is up already" in done.stderr
    assert json.loads(done.stdout)["address"] == running_cluster.record.gcs_address
    after = {process.pid for process in marked_processes(running_cluster.record.cluster_id)}
    assert before <= after


@pytest.mark.parametrize("command", ["up", "down"])
def test_another_file_of_the_same_name_neither_takes_nor_ends_it(
    running_cluster: LiveCluster, tmp_path: Path, command: str
) -> None:
    other = write_config(tmp_path, running_cluster.record.name)
    done = shoal(command, "-f", str(other))
    assert done.returncode == 2
    assert str(running_cluster.config_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert marked_processes(running_cluster.record.cluster_id)


def test_the_api_asks_for_the_token(running_cluster: LiveCluster) -> None:
    url = f"{running_cluster.record.dashboard_url}/api/jobs/"
    token = Path(running_cluster.record.token_path).read_text()
    headers = [{}, {"Authorization": "Bearer " + token[::-1]}, {"Authorization": "Bearer " + token}]
    codes = [httpx.get(url, headers=each, timeout=10).status_code for each in headers]
    assert codes[0] == 401
    assert codes[1] in (401, 403)
    assert codes[2] == 200


def test_nobody_else_can_read_the_token(running_cluster: LiveCluster) -> None:
    directory = state_directory(running_cluster.record.name)
    assert Path(running_cluster.record.token_path).stat().st_mode & 0o777 == 0o600
    assert [path.stat().st_mode & 0o777 for path in (directory, directory.parent)] == [0o700, 0o700]


def test_what_need_not_be_reached_from_elsewhere_binds_loopback(running_cluster: LiveCluster) -> None:
    ours = {
        process.pid: " ".join(process.cmdline())
        for process in marked_processes(running_cluster.record.cluster_id)
    }
    listening = [
        (ours[each.pid], each.laddr)
        for each in psutil.net_connections("inet")
        if each.pid in ours and each.status == psutil.CONN_LISTEN
    ]
    port = int(running_cluster.record.dashboard_url.rpartition(":")[2])
    dashboard = [address.ip for _, address in listening if address.port == port]
    client_server = [address.ip for command, address in listening if "ray.util.client.server" in command]
    assert dashboard == [running_cluster.record.head_ip]
    assert client_server
    for ip in client_server:
        assert ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ray status", "CPU"),
        pytest.param("ray list nodes", "shoal.io/node: worker-1", marks=pytest.mark.slow),
        ("ray job list", "JobDetails"),
        pytest.param("serve status", "applications: {}", marks=pytest.mark.slow),
        pytest.param(
            "ray job submit --working-dir . -- python -c 'import cluster, train_jobs; print(6 * 7)'",
            "42",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rays_own_tools_work_under_the_printed_exports(
    running_cluster: LiveCluster, tmp_path: Path, command: str, expected: str
) -> None:
    exports = running_cluster.shoal("env")
    assert exports.returncode == 0, exports.stderr
    done = subprocess.run(
        ["sh", "-c", f"{exports.stdout}\nexec {shlex.quote(str(TOOLS))}/{command}"],
        env=caller_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def unreachable(record: ClusterRecord) -> list[ClusterRecord]:
    """Records of the cluster as if parts of it were gone: nothing listens on port 9."""
    head = replace(record.nodes[0], raylet_address=f"{record.head_ip}:9")
    return [
        replace(record, gcs_address=f"{record.head_ip}:9"),
        replace(record, nodes=(head, *record.nodes[1:])),
    ]


def test_a_connection_to_what_does_not_answer_fails_soon_with_a_sentence(
    running_cluster: LiveCluster,
) -> None:
    for record in unreachable(running_cluster.record):
        start = time.monotonic()
        with pytest.raises(ShoalError, match=f"cluster {record.name} is not up: .* does not answer: run"):
            connect(record)
        assert time.monotonic() - start < 5


def test_status_of_a_cluster_that_was_never_started_says_so(tmp_path: Path) -> None:
    path = write_config(tmp_path, "never-started")
    done = shoal("status", "-f", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cluster never-started is not up: run `shoal up`\n"
    done = shoal("down", "-f", str(path))
    assert (done.returncode, done.stdout) == (0, "cluster never-started was not up\n")
