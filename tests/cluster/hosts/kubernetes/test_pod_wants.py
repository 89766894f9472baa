"""Ray's own autoscaler is told what leases want; its nodes are processes of one host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cluster.config.loader import load_config
from cluster.errors import ConfigError
from cluster.hosts.kubernetes.manifests import ray_cluster
from cluster.hosts.kubernetes.pod_wants import kinds_of_pods
from cluster.sharing.growth import NodeKind
from cluster.state.nodes import KIND_LABEL
from infra.lab.hosts.lan import Lan
from tests.lans import INSTALLED, needs_hosts

CONFIG = """
cluster:
  name: lab
  provider: kubernetes
  nodes:
    - {name: head, cpus: 4}
    - {name: cpu, count: 2, cpus: 8}
    - {name: gpu, cpus: 8, gpus: 2, accelerator: H100}
    - {name: store, cpus: 0}
  storage: /data/shoal
  kubernetes: {image: "shoal:1", storage_claim: data, autoscaler: {most: {gpu: 5}}}
"""
STORY = """
import json, os, subprocess, sys, time
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

KIND = {"resources": {"CPU": 2}, "labels": {"shoal.io/kind": "node"}, "node_config": {}, "min_workers": 0,
        "max_workers": 3}
# (The wheel lacks the defaults that belong to the type `fake_multinode`.)
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
config = {
    "cluster_name": "lab", "max_workers": 8, "idle_timeout_minutes": 0.1, "upscaling_speed": 1.0, "auth": {},
    "provider": {"type": "external", "module": PROVIDER, "use_node_id_as_ip": True,
                 "disable_node_updaters": True, "disable_launch_config_check": True, "launch_multiple": True,
                 "head_node_id": FAKE_HEAD_NODE_ID},
    "available_node_types": {"node": KIND, "ray.head.default": HEAD}, "file_mounts": {},
    "head_node_type": "ray.head.default",
    "cluster_synced_files": [], "file_mounts_sync_continuously": False, "initialization_commands": [],
    "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
    "head_start_ray_commands": [], "worker_start_ray_commands": [],
}
with open("/srv/autoscaling.json", "w") as file:
    json.dump(config, file)
own = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1",
       "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}
start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=0",
         "--disable-usage-stats", "--autoscaling-config=/srv/autoscaling.json"]
subprocess.run(start, env={**os.environ, **own}, check=True)
ray.init("auto", namespace="shoal", log_to_driver=False)

from cluster.hosts.kubernetes import pod_wants
from cluster.sharing.broker import start_broker
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand
from cluster.sharing.growth import NodeKind
from cluster.actors.head_actor import start_on_head

start_broker({"name": "lab", "storage": sys.argv[1], "probed": False,
              "head_ip": ray.util.get_node_ip_address()})
kinds = [NodeKind("node", 3, {"CPU": 2.0})]
start_on_head(pod_wants.PodWants, pod_wants.NAME, "shoal", kinds, what="it", first_call="hears")
broker = BrokerClient()

def alive():
    return sum(row["Alive"] and row["Resources"].get("CPU", 0) == 2 for row in ray.nodes())

def until(condition, limit_s=90):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, (alive(), broker.leases(), broker.nodes_of_use(kinds))
        time.sleep(0.3)
    return time.monotonic() - began

def ask(demand):
    return until(lambda: broker.request(demand).units == demand.min)

told = {"at_first": alive()}
told["granted_s"] = ask(Demand("job", "training", {"CPU": 1}, 3, 3))
told["for_three_cpus"] = alive()
told["granted_again_s"] = ask(Demand("app", "serving", {"CPU": 2}, 1, 1))
told["with_an_app"] = alive()
broker.release("job")
broker.release("app")
told["gone_s"] = until(lambda: alive() == 0)
print(json.dumps(told))
"""


def test_pods_that_come_and_go_are_those_of_the_config(tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text(CONFIG)
    assert kinds_of_pods(load_config(file).resolved.cluster) == [
        NodeKind("cpu", 2, {"CPU": 8.0}),
        NodeKind("gpu", 5, {"CPU": 8.0, "GPU": 2.0}, "H100"),
    ]


def test_pods_are_asked_for_by_the_label_that_their_nodes_have(tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text(CONFIG)
    cluster = load_config(file).resolved.cluster
    groups = ray_cluster(cluster)["spec"]["workerGroupSpecs"]
    labels = {group["groupName"]: group["labels"] for group in groups}
    assert {kind.name: labels[kind.name][KIND_LABEL] for kind in kinds_of_pods(cluster)} == {
        "cpu": "cpu",
        "gpu": "gpu",
    }


def test_jobs_are_checked_against_the_pods_that_may_come(tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    job = """
train_jobs:
  large: {task: script, script: train.py, workers: {min: MIN, max: MIN, gpus: 1}}
"""
    (tmp_path / "train.py").touch()
    file.write_text(CONFIG + job.replace("MIN", "10"))
    assert load_config(file).resolved.cluster.known_nodes[2].count == 5
    file.write_text(CONFIG + job.replace("MIN", "11"))
    with pytest.raises(ConfigError, match="cannot be placed"):
        load_config(file)


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rays_autoscaler_makes_the_nodes_that_leases_wait_for_and_ends_them(tmp_path: Path) -> None:
    with Lan(["alone"], tmp_path) as lan:
        story = [sys.executable, "-c", STORY, "/srv"]
        done = lan.host("alone").run(*story, environment=INSTALLED, timeout_s=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert (told["at_first"], told["for_three_cpus"], told["with_an_app"]) == (0, 2, 3)
