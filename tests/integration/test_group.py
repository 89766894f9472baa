"""A group that is killed while it waits for its devices, on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import LiveCluster
from tests.integration.jobs import JOB
from tests.train_jobs.ranks import merged

WAITS_AND_IS_KILLED = """
import json, sys, time
import psutil
import ray
from ray.util.placement_group import placement_group_table
from ray.util.state import list_actors
from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from train_jobs.group.job_agents import JobAgents
from train_jobs.group.group import Group
from train_jobs.spec import GroupSpec

killer, storage, config = sys.argv[1:]
ray.init(log_to_driver=False)

def until(condition):
    deadline = time.monotonic() + 60
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return answer

def groups(state):
    return [each for each in placement_group_table().values() if each["state"] == state]

@ray.remote(num_cpus=1)
class Stranger:
    def ready(self):
        pass

cpus = int(ray.cluster_resources()["CPU"])
strangers = [Stranger.remote() for _ in range(cpus)]
ray.get([each.ready.remote() for each in strangers])
(node, *_) = [each["NodeID"] for each in ray.nodes() if each["Resources"].get("CPU")]
job = TrainJobConfig.model_validate_json(config)
spec = GroupSpec("job", job, storage, 1, 0, (node,))
group = Group(JobAgents(job))
group.start(spec, Storage(storage).child("ray_train"))

def alive():
    return list_actors(filters=[("class_name", "=", "GroupRunner"), ("state", "=", "ALIVE")])

runner = psutil.Process(until(alive)[0].pid)
time.sleep(5)  # it has imported Ray Train, and waits
if killer == "driver":
    group.kill()
else:
    runner.kill()
    outcome = group.outcome()
    assert [failure.died for failure in outcome.failures] == [True]
until(lambda: not runner.is_running())
for stranger in strangers:
    ray.kill(stranger)
until(lambda: ray.available_resources().get("CPU") == cpus)
time.sleep(2)  # what was left would be placed now
print(json.dumps([len(groups(state)) for state in ("PENDING", "CREATED")]))
"""


GIVEN_GPUS = """
import json, sys, time
import ray
from cluster.config.sections.train import TrainJobConfig
from train_jobs.group.group_devices import GroupDevices, NoDevicesError, given_gpus
from train_jobs.spec import GroupSpec

ray.init("local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
(node,) = [each["NodeID"] for each in ray.nodes() if each["Resources"].get("GPU")]
job = TrainJobConfig.model_validate_json(sys.argv[1])
said = []
for attempt in (1, 2):
    spec = GroupSpec("job", job, "nowhere", attempt, 0, (node, node))
    devices = GroupDevices(spec, 0.0)
    said.append([given_gpus(spec, rank, 0.0) for rank in (0, 1)])
    devices.give_back()
print(json.dumps(said))
"""


@pytest.mark.slow
def test_ranks_are_shown_the_gpus_of_their_group_on_their_node(tmp_path: Path) -> None:
    """Ray hands out GPUs by their numbers, whether the machine has any or not."""
    workers = {"min": 2, "max": 2, "gpus": 2}
    config = json.dumps(merged(JOB, {"workers": workers, "data": {"source": "corpus.parquet"}}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)  # Ray keeps a token there
    program = [sys.executable, "-c", GIVEN_GPUS, config]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    for first, second in json.loads(ended.stdout.splitlines()[-1]):
        assert first[1] == second[1] == ["0", "1", "2", "3"]
        assert sorted(first[0] + second[0]) == first[1]


@pytest.mark.slow
@pytest.mark.parametrize("killer", ["driver", "somebody"])
def test_a_group_that_is_killed_while_it_waits_for_its_devices_never_gets_them(
    running_cluster: LiveCluster, tmp_path: Path, killer: str
) -> None:
    config = json.dumps(merged(JOB, {"workers": {"min": 1, "max": 1}, "data": {"source": "corpus.parquet"}}))
    program = tmp_path / "program.py"
    program.write_text(WAITS_AND_IS_KILLED)
    ended = running_cluster.python(f"""
import runpy, sys
sys.argv = [{str(program)!r}, {killer!r}, {str(tmp_path)!r}, {config!r}]
runpy.run_path({str(program)!r}, run_name="__main__")
""")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [0, 0]
