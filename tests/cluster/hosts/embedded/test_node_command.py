"""The command and the environment of a node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.config.sections.cluster import NodeConfig
from cluster.errors import RequestError
from cluster.hosts.embedded.identity import Identity
from cluster.hosts.embedded.node_command import (
    HeadPorts,
    NodeStart,
    node_command,
    node_environment,
    store_bytes,
)

GCS = "127.7.8.10:6379"
STATE = Path("/tmp/shoal-0/demo")
PYTHON = "/home/me/.venv/bin/python"
IDENTITY = Identity(
    name="demo",
    cluster_id="the-id",
    config_path="/home/me/shoal.yaml",
    subnet="127.7.8",
    dashboard_host="127.7.8.10",
    dashboard_port=8265,
    gateway_host="127.7.8.10",
    gateway_port=8000,
    serve_host="127.7.8.2",
)


def node(gpus_of_its_own: tuple[str, ...] = (), **shape: object) -> NodeStart:
    kind = NodeConfig.model_validate({"name": "worker", **shape})
    return NodeStart("worker-1", "127.7.8.11", kind, STATE / "n1", gpus_of_its_own)


def test_a_node_joins_and_the_head_listens() -> None:
    joins = node_command("python", node(cpus=2), IDENTITY, "127.7.8.10:6000", 10**8, None)
    heads = node_command(
        "python", node(cpus=0), IDENTITY, "127.7.8.10:6000", 10**8, HeadPorts(6000, 6001, 6002)
    )
    assert "--address=127.7.8.10:6000" in joins
    assert {"--num-cpus=2", "--node-ip-address=127.7.8.11", f"--temp-dir={STATE}/n1"} <= set(joins)
    assert not any(argument.startswith(("--head", "--dashboard-host")) for argument in joins)
    assert {"--head", "--port=6000", "--dashboard-host=127.7.8.10", "--dashboard-port=8265"} <= set(heads)
    assert "--node-manager-port=6002" in heads
    assert not any(argument.startswith("--node-manager-port") for argument in joins)
    assert not any(argument.startswith("--address") for argument in heads)


def test_name_and_accelerator_become_labels() -> None:
    command = node_command("python", node(accelerator="H100-SXM"), IDENTITY, "a:1", 10**8, None)
    assert "--labels=shoal.io/node=worker-1,shoal.io/accelerator=H100-SXM" in command


@pytest.mark.parametrize("accelerator", ["", "H100 SXM", "a,b=c", "x" * 64])
def test_an_accelerator_that_cannot_be_a_label_is_refused(accelerator: str) -> None:
    with pytest.raises(RequestError, match="cannot be a label"):
        node_command("python", node(accelerator=accelerator), IDENTITY, "a:1", 10**8, None)


def test_nothing_of_another_cluster_reaches_the_node() -> None:
    caller = {
        "PATH": "/bin",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_AUTH_TOKEN": "theirs",
        "RAY_AUTH_MODE": "disabled",
        "SHOAL_CLUSTER_ID": "outer",
        "RAY_memory_usage_threshold": "0.9",
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": "theirs.pem",
    }
    variables = node_environment(caller, PYTHON, node(), IDENTITY, GCS, STATE)
    assert variables["SHOAL_CLUSTER_ID"] == "the-id"
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_AUTH_TOKEN_PATH"] == f"{STATE}/token"
    assert variables["RAY_memory_usage_threshold"] == "0.9"
    assert not {"RAY_AUTH_TOKEN", "RAY_USE_TLS", "RAY_TLS_CA_CERT"} & variables.keys()
    assert variables["RAY_ADDRESS"] == GCS


def test_a_head_without_cpus_starts_several_processes_at_once_too() -> None:
    starts = "RAY_worker_maximum_startup_concurrency"
    assert int(node_environment({}, PYTHON, node(), IDENTITY, GCS, STATE)[starts]) >= 4
    assert node_environment({starts: "2"}, PYTHON, node(), IDENTITY, GCS, STATE)[starts] == "2"


def test_jobs_find_our_python_first_and_have_time_to_save_when_they_are_stopped() -> None:
    variables = node_environment({"PATH": "/usr/bin:/bin"}, PYTHON, node(), IDENTITY, GCS, STATE)
    assert variables["PATH"] == "/home/me/.venv/bin:/usr/bin:/bin"
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    chosen = node_environment({"RAY_JOB_STOP_WAIT_TIME_S": "7"}, PYTHON, node(), IDENTITY, GCS, STATE)
    assert chosen["RAY_JOB_STOP_WAIT_TIME_S"] == "7"


def test_relative_python_paths_mean_the_same_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caller = {"PYTHONPATH": f".{os.pathsep}/abs{os.pathsep}lib"}
    entries = node_environment(caller, PYTHON, node(), IDENTITY, GCS, STATE)["PYTHONPATH"].split(os.pathsep)
    assert entries == [str(tmp_path), "/abs", str(tmp_path / "lib")]


def test_a_node_sees_the_gpus_that_are_its_own_and_no_other() -> None:
    caller = {"CUDA_VISIBLE_DEVICES": "0,1,2,5"}
    for own, seen in (((), ""), (("2", "5"), "2,5")):
        variables = node_environment(caller, PYTHON, node(own, gpus=len(own)), IDENTITY, GCS, STATE)
        assert variables["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("memory_gib", "num_nodes", "mib"), [(64, 3, 1024), (8, 4, 409), (1, 50, 80), (4096, 1, 1024)]
)
def test_object_stores_together_stay_within_their_share(memory_gib: int, num_nodes: int, mib: int) -> None:
    assert store_bytes(memory_gib * 2**30, num_nodes) // 2**20 == mib


def test_whoever_starts_serve_on_the_node_has_its_proxy_listen_at_the_clusters_own_address() -> None:
    variables = node_environment({}, PYTHON, node(), IDENTITY, GCS, STATE)
    assert variables["RAY_SERVE_DEFAULT_HTTP_HOST"] == "127.7.8.2"


def test_of_the_callers_shell_only_what_every_job_needs_comes_along() -> None:
    taken = {
        "HOME": "/home/me",
        "LC_ALL": "C.UTF-8",
        "LD_LIBRARY_PATH": "/opt/lib",
        "https_proxy": "http://proxy:3128",
        "AWS_PROFILE": "team",
        "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "RAY_memory_usage_threshold": "0.9",
    }
    left = {
        "RANK": "3",
        "MASTER_ADDR": "elsewhere",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/home/me/hf",
        "WANDB_API_KEY": "mine",
        "PS1": "$ ",
        "BASH_FUNC_module%%": "() { :; }",
    }
    variables = node_environment({**taken, **left}, PYTHON, node(), IDENTITY, GCS, STATE)
    assert taken.items() <= variables.items()
    assert not left.keys() & variables.keys()
    own = {"NCCL_SOCKET_IFNAME": "ib0", "HF_HOME": None, "AWS_PROFILE": "ours", "NODE": "1"}
    variables = node_environment({**taken, **left}, PYTHON, node(), IDENTITY, GCS, STATE, own)
    assert {**own, "HF_HOME": "/home/me/hf"}.items() <= variables.items()
    with pytest.raises(RequestError, match=r"cluster\.env: HF_TOKEN should be passed on"):
        node_environment(left, PYTHON, node(), IDENTITY, GCS, STATE, {"HF_TOKEN": None})
