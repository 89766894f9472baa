"""Two hundred engines that are killed at random moments, also while they start: nothing of them is left."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from serve_apps.controller import engine_devices
from tests.clusters import started
from tests.serve_apps import driver
from tests.serve_apps.drill_load import drill_load
from tests.serve_apps.drills import THREE_WORKERS, TORCH, Stage, staged, until

KILLED = 200
ENGINE = "shoal::Engine:chat:"
REPLICA = "ServeReplica:chat"
MOST_PAUSE_S = 2.0
REPLICA_EVERY = 20
"""One kill in so many takes the replica before it, and not the engine."""
BACK_S = 120.0
"""After so many failures an engine is started half a minute after the last one."""
SLACK_BYTES = 200 * 2**20
SLACK_SOCKETS = 8


@dataclass(frozen=True)
class Taken:
    """What a cluster has taken of its machine while its app only stands there."""

    titles: Counter[str]
    """Its processes, by what they are."""
    memory_bytes: int
    """Of all of them; pages that several have count once."""
    listening: int
    """Sockets."""
    connections: int
    devices: int
    free_cpus: float


def devices() -> int:
    """Placement groups of engines."""
    return len(engine_devices.look())


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


def taken(stage: Stage) -> Taken:
    titles: Counter[str] = Counter()
    memory_bytes = listening = connections = 0
    for process in stage.cluster.processes(""):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            # Of an actor that is at work, Ray adds the method.
            titles[ENGINE if ENGINE in line else process.name().partition(".")[0]] += 1
            memory_bytes += process.memory_full_info().pss
            for each in process.net_connections("tcp"):
                listening += each.status == psutil.CONN_LISTEN
                connections += each.status == psutil.CONN_ESTABLISHED and each.family == socket.AF_INET
    found = stage.call(devices), stage.call(free_cpus)
    return Taken(titles, memory_bytes, listening, connections, *found)


def settled(stage: Stage) -> Taken:
    """What is taken when both engines answer and nothing starts any more."""
    until(lambda: stage.call(driver.running_replicas, "chat") == 2, BACK_S)
    until(lambda: len(stage.cluster.processes(ENGINE)) == 4, BACK_S)
    until(lambda: len(stage.cluster.processes(REPLICA)) == 3, BACK_S)
    before = taken(stage)
    while True:
        time.sleep(5.0)
        now = taken(stage)
        if (now.titles, now.devices) == (before.titles, before.devices):
            return now
        before = now


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_nothing_is_left_of_engines_that_are_killed_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(200)
    with (
        started(tmp_path, *THREE_WORKERS) as cluster,
        staged(cluster, TORCH, tmp_path / "model") as stage,
    ):
        with drill_load(stage.url, clients=4, max_tokens=20):
            time.sleep(5.0)  # what only the first requests take
        before, killed, engines = settled(stage), 0, set()
        with drill_load(stage.url, clients=2, max_tokens=20):
            while killed < KILLED:
                time.sleep(draw.uniform(0, MOST_PAUSE_S))
                victims = cluster.processes(REPLICA if killed % REPLICA_EVERY == 1 else ENGINE)
                if victims:
                    victim = draw.choice(victims)
                    with suppress(psutil.NoSuchProcess):
                        engines.add(":".join(" ".join(victim.cmdline()).split(":")[:5]))
                        victim.kill()
                        killed += 1
        until(lambda: settled(stage).titles == before.titles, BACK_S)
        after = taken(stage)
        print(f"{killed} kills of {len(engines)} engines and replicas: before {before}, after {after}")
        with drill_load(stage.url, clients=4, max_tokens=20) as load:
            until(lambda: len(load.seen) > 20, 60)
        assert all(seen.answered for seen in load.seen)
    assert after.titles == before.titles
    assert (after.devices, after.free_cpus) == (before.devices, before.free_cpus) == (2, 2.0)
    assert after.listening <= before.listening + SLACK_SOCKETS
    assert after.connections <= before.connections + SLACK_SOCKETS
    assert after.memory_bytes <= before.memory_bytes + SLACK_BYTES
