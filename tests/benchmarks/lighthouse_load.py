"""What the lighthouse of a large job costs: its share of a core, and how long heartbeats wait; run by hand.

    python tests/benchmarks/lighthouse_load.py [--nodes 100] [--groups 1] [--ranks 8] [--seconds 10]

A real lighthouse on a Ray of its own on this machine, and four actors that play the nodes, each with so many
replica groups of so many ranks: all groups meet twice, then all nodes send their heartbeats.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import ray
from ray.actor import ActorHandle

from cluster.actors import NAMESPACE

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.train import RecoveryConfig
from train_jobs.elastic.lighthouse import lighthouse_name, start_lighthouse
from train_jobs.elastic.membership import NO_STATE, Beat, heartbeat_period_s

JOB, ATTEMPT, PLAYERS = "job", 1, 4
TIMEOUT_S = RecoveryConfig().heartbeat_timeout_s
PERIOD_S = heartbeat_period_s(TIMEOUT_S)


@ray.remote(num_cpus=0)
class Nodes:
    """Some nodes of the job: the names of their groups, of so many ranks each."""

    def __init__(self, nodes: Sequence[Sequence[str]], ranks: int) -> None:
        self._nodes, self._ranks = nodes, ranks
        self._lighthouse = ray.get_actor(lighthouse_name(JOB, ATTEMPT), namespace=NAMESPACE)

    async def meet(self) -> None:
        """All groups arrive, and are heard while they wait."""
        groups = [group for node in self._nodes for group in node]
        met = asyncio.gather(
            *(self._lighthouse.arrive.remote(each, NO_STATE, self._ranks) for each in groups)
        )
        while not met.done():
            await asyncio.gather(*(self._beat(node, 0) for node in self._nodes))
            await asyncio.wait([met], timeout=PERIOD_S)

    async def beat(self, seconds: float) -> list[float]:
        """Seconds that each heartbeat of a node waited for its answer."""
        until = time.monotonic() + seconds

        async def keep(node: Sequence[str], first: float) -> list[float]:
            waits = []
            await asyncio.sleep(first)
            while time.monotonic() < until:
                waits.append(await self._beat(node, 1))
                await asyncio.sleep(max(0.0, PERIOD_S - waits[-1]))
            return waits

        spread = [PERIOD_S * index / len(self._nodes) for index in range(len(self._nodes))]
        found = await asyncio.gather(*(keep(*each) for each in zip(self._nodes, spread, strict=True)))
        return [wait for waits in found for wait in waits]

    async def _beat(self, node: Sequence[str], view: int) -> float:
        began = time.monotonic()
        await self._lighthouse.heartbeats.remote(
            [Beat(group, rank, view) for group in node for rank in range(self._ranks)]
        )
        return time.monotonic() - began


def cpu_s() -> float:
    """CPU seconds of the lighthouse so far."""
    found = psutil.process_iter(["cmdline"])
    (process,) = [each for each in found if "ray::Lighthouse" in " ".join(each.info["cmdline"] or ())]
    return sum(process.cpu_times()[:2])


def meet(players: Sequence[ActorHandle], what: str) -> None:
    began, before = time.monotonic(), cpu_s()
    ray.get([each.meet.remote() for each in players])
    print(f"{what}: {time.monotonic() - began:.2f} s, of the lighthouse's CPU {cpu_s() - before:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--groups", type=int, default=1, help="on each node")
    parser.add_argument("--ranks", type=int, default=8, help="of each group")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = sys.path[0]
    ray.init(num_cpus=1, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    nodes = [[f"{node}-{group}" for group in range(options.groups)] for node in range(options.nodes)]
    lighthouse = start_lighthouse(JOB, ATTEMPT, [group for node in nodes for group in node], TIMEOUT_S)
    ray.get(lighthouse.view.remote())
    players = [Nodes.remote(nodes[first::PLAYERS], options.ranks) for first in range(PLAYERS)]  # type: ignore[attr-defined]
    meet(players, "all groups meet, and the nodes start")
    meet(players, "all groups meet again")
    began, before = time.monotonic(), cpu_s()
    found = ray.get([each.beat.remote(options.seconds) for each in players])
    waits = [wait for each in found for wait in each]
    seconds, used = time.monotonic() - began, cpu_s() - before
    print(
        f"{len(waits) / seconds:.0f} heartbeats of nodes a second: {used / seconds:.0%} of a core, "
        f"{statistics.median(waits) * 1e3:.0f} ms to the answer (worst {max(waits) * 1e3:.0f})"
    )


if __name__ == "__main__":
    main()
