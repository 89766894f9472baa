"""The devices of engines are Ray's, which learns late of what has become free."""

from __future__ import annotations

import json

from tests.clusters import LiveCluster

PROGRAM = """
import json, logging
import ray
ray.init(namespace="shoal", log_to_driver=False, logging_level=logging.ERROR)
from ray.util.placement_group import placement_group, remove_placement_group
from serve_apps.controller import engine_devices

node = next(row for row in ray.nodes() if row["Alive"] and row["Resources"].get("CPU"))
all_of_it = {"CPU": node["Resources"]["CPU"]}
label = [{"ray.io/node-id": node["NodeID"]}]
said = []
for number in range(3):
    before = placement_group([all_of_it], bundle_label_selector=label)
    ray.get(before.ready(), timeout=60)
    remove_placement_group(before)
    name = engine_devices.new_name("chat:1", f"r{number}")
    engine_devices.reserve(name, node["NodeID"], {"CPU": 1})
    said.append([each.node == node["NodeID"] for each in engine_devices.look() if each.name == name])
    engine_devices.free(name)
    said.append([each.name for each in engine_devices.look()])
    engine_devices.free(name)
print(json.dumps(said))
"""


def test_devices_that_were_freed_a_moment_ago_are_an_engines_at_once(running_cluster: LiveCluster) -> None:
    done = running_cluster.python(PROGRAM, timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[True], []] * 3
