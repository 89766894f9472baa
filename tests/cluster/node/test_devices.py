"""Devices are placed as soon as they are free, and none are lost: on a Ray of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.node import devices

PROGRAM = """
import json, random, time
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from cluster.node import devices

CPUS, ONE = 64, {"CPU": 1.0}
ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
node = ray.get_runtime_context().get_node_id()
draw = random.Random(7)

def free():
    return ray.available_resources().get("CPU", 0.0)

def settled():
    time.sleep(1.5)  # what is on its way arrives
    return CPUS - free()

def wanted_until_it_is_asked_for():
    yield from (True, True)
    time.sleep(draw.uniform(0, 0.005))
    while True:
        yield False

for number in range(300):
    answers = wanted_until_it_is_asked_for()
    name = f"for a moment {number}"
    assert devices.reserve(name, [ONE], [node], is_wanted=lambda: next(answers)) is None
    assert devices.find_placed(name) is None
ours = settled()

waited = []
for number in range(5):
    held = placement_group([{"CPU": float(CPUS)}])
    ray.get(held.ready(), timeout=60)
    remove_placement_group(held)
    began = time.monotonic()
    group = devices.reserve(f"all of it {number}", [{"CPU": CPUS / 2}] * 2, [node] * 2)
    waited.append(time.monotonic() - began)
    assert devices.find_placed(f"all of it {number}") is not None
    devices.give_back(group)

held = placement_group([{"CPU": float(CPUS)}])
ray.get(held.ready(), timeout=60)
until = time.monotonic() + 1
none = devices.reserve("not wanted", [ONE], [node], seconds=60, is_wanted=lambda: time.monotonic() < until)
assert none is None and devices.find_placed("not wanted") is None
waits = devices.reserve("waits in Ray", [ONE], [node], seconds=0.2)
assert devices.find_placed("waits in Ray") is None
remove_placement_group(held)
devices.wait_for_placed("waits in Ray", 30)
devices.give_back(waits)

for number in range(150):
    group = placement_group([ONE], bundle_label_selector=[{"ray.io/node-id": node}])
    time.sleep(draw.uniform(0, 0.002))
    remove_placement_group(group)
print(json.dumps({"ours": ours, "waited": sorted(waited), "rays": settled()}))
"""


def test_devices_are_placed_at_once_and_lost_by_nobody_who_changes_his_mind(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)  # Ray keeps a token there
    program = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=150, env=environment)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["ours"] == 0
    assert said["waited"][2] < 0.5, "median of five"
    assert said["rays"] > 0, "Ray loses nothing any more: `give_back` need not wait"


@pytest.mark.parametrize(("looks", "state"), [(3, "CREATED"), (1, "REMOVED"), (10_000, "PENDING")])
def test_what_is_being_placed_is_not_removed_before_it_is(
    monkeypatch: pytest.MonkeyPatch, looks: int, state: str
) -> None:
    """Where it waits for room it is not waited for."""
    monkeypatch.setattr(devices, "_PLACING_S", 0.3)
    states = iter([*["PENDING"] * (looks - 1), state])
    seen: list[str] = []

    def table(group: Any) -> dict[str, str]:
        seen.append(next(states))
        return {"state": seen[-1]}

    monkeypatch.setattr(devices, "placement_group_table", table)
    monkeypatch.setattr(devices, "remove_placement_group", lambda group: seen.append("removed"))
    devices.give_back(None)  # type: ignore[arg-type]
    assert seen[-2:] == [state, "removed"]
    assert len(seen) == looks + 1 or state == "PENDING"
