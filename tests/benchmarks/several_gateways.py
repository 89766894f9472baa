"""How much more two gateways answer than one, each with a part of a core of its own; run by hand, as root.

    python tests/benchmarks/several_gateways.py [--json] [--repeats 5] [--cores 0.15]

A cluster of a head and two nodes with a gateway each, without a front; an app of two replicas of an engine
that costs nothing. Clients ask for one token at a time, through one gateway and through two in turn; control
groups hold each gateway to its part of a core, so that the rest is enough for clients and replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.serve import ServeAppConfig
from serve_apps.spec import AppSpec
from tests.benchmarks.cpu_quota import limited
from tests.clusters import HEAD_AND_TWO, started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.tiny_model import make_tokenizer

ENGINE = "tests.benchmarks.costless_engine:CostlessEngine"
CLIENTS = 8
"""Of each gateway."""


def gateways() -> list[str]:
    from serve_apps.controller.client import ControllerClient

    return [each["url"] for each in ControllerClient().serving()["gateways"]]


async def requests_per_s(urls: list[str], seconds: float) -> float:
    """How many requests are answered in a second, by all of these gateways together."""
    answered = 0
    body = {"model": "chat", "prompt": [5], "max_tokens": 1}

    async def ask(session: aiohttp.ClientSession, url: str, until: float, *, counts: bool) -> None:
        nonlocal answered
        while time.perf_counter() < until:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                await response.read()
            answered += counts

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for counts, for_s in ((False, 2.0), (True, seconds)):
            until = time.perf_counter() + for_s
            await asyncio.gather(
                *(ask(session, url, until, counts=counts) for url in urls for _ in range(CLIENTS))
            )
    return answered / seconds


def measure(directory: Path, repeats: int, cores: float, seconds: float) -> dict[str, Any]:
    make_tokenizer(directory / "model")
    config = ServeAppConfig.model_validate(
        {"model": str(directory / "model"), "replicas": {"min": 2}, "limits": {"batch": 64, "queue": 1000}}
    )
    spec = AppSpec("chat", config, model_path=str(directory / "model"), model_version="m@1", engine=ENGINE)
    found: dict[str, list[float]] = {"one": [], "two": []}
    with (
        started(directory, *HEAD_AND_TWO, "gateway: {count: 3, front: none}") as cluster,
        Driver(cluster.record) as call,
    ):
        call(driver.start)
        call(driver.deploy, spec)
        while len(urls := call(gateways)) < 3:
            time.sleep(0.2)
        processes = cluster.processes("ray::ServeReplica:gateway")
        with limited([each.pid for each in processes], cores):
            for _ in range(repeats):
                found["one"].append(asyncio.run(requests_per_s(urls[:1], seconds)))
                found["two"].append(asyncio.run(requests_per_s(urls[:2], seconds)))
    ratios = [two / one for one, two in zip(found["one"], found["two"], strict=True)]
    return {**found, "ratios": ratios, "median_ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=float, default=0.15, help="of each gateway")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), arguments.repeats, arguments.cores, arguments.seconds)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for one, two, ratio in zip(found["one"], found["two"], found["ratios"], strict=True):
        print(f"one gateway {one:6.1f} requests/s, two {two:6.1f}, {ratio:.2f} times as many")
    print(f"median: {found['median_ratio']:.2f}")


if __name__ == "__main__":
    main()
