"""What the gateway itself costs, with an engine that costs nothing; run by hand.

    python tests/benchmarks/gateway_cost.py [--json] [--repeats 3] [--front none]

A cluster of a head and a node, one app of one replica, clients on the same machine. Streams: every client
asks for 64 tokens again and again; tokens/s are those of all clients together, events/s the messages in which
they came. Latency: answers of one token without streaming, at so many requests at a time. The load generator
(aiohttp) runs on the same cores; its processor time is given as a part of one core.
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

from cluster.config.sections.serve import LimitsConfig, ServeAppConfig
from serve_apps.spec import AppSpec
from tests.clusters import started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.tiny_model import make_tokenizer

ENGINE = "tests.benchmarks.costless_engine:CostlessEngine"
TOKENS = 64


async def stream(session: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """Tokens (by their text) and events of one streamed answer."""
    body = {"model": "chat", "prompt": [5], "max_tokens": TOKENS, "stream": True}
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        answer = await response.read()
    assert answer.endswith(b"data: [DONE]\n\n"), answer[-200:]
    return answer.count(b" token"), answer.count(b"data: ") - 1


async def whole(session: aiohttp.ClientSession, url: str) -> float:
    began = time.perf_counter()
    async with session.post(url, json={"model": "chat", "prompt": [5], "max_tokens": 1}) as response:
        response.raise_for_status()
        await response.read()
    return time.perf_counter() - began


async def streams(url: str, clients: int, seconds: float) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(stream(session, url) for _ in range(clients)))
        began, own = time.perf_counter(), time.process_time()
        counted = [0, 0, 0]

        async def client() -> None:
            while time.perf_counter() - began < seconds:
                tokens, events = await stream(session, url)
                assert tokens == TOKENS
                counted[0] += tokens
                counted[1] += events
                counted[2] += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        took = time.perf_counter() - began
        return {
            "tokens_per_s": counted[0] / took,
            "events_per_s": counted[1] / took,
            "request_ms": clients * took / counted[2] * 1000,
            "load_generator_cores": (time.process_time() - own) / took,
        }


async def latencies(url: str, clients: int, seconds: float) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(whole(session, url) for _ in range(clients)))
        began = time.perf_counter()
        taken: list[float] = []

        async def client() -> None:
            while time.perf_counter() - began < seconds:
                taken.append(await whole(session, url))

        await asyncio.gather(*(client() for _ in range(clients)))
        took = time.perf_counter() - began
        cuts = statistics.quantiles(taken, n=100)
        return {
            "requests_per_s": len(taken) / took,
            "p50_ms": statistics.median(taken) * 1000,
            "p99_ms": cuts[98] * 1000,
        }


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the repeats, which go round the loads."""
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        for clients in (1, 16, 64):
            result = asyncio.run(streams(url, clients, options.seconds))
            rows.setdefault(f"streams, {clients} clients", []).append(result)
        for clients in (1, 8, 64):
            result = asyncio.run(latencies(url, clients, options.seconds))
            rows.setdefault(f"one token, {clients} at a time", []).append(result)
    return {
        load: {name: statistics.median(row[name] for row in results) for name in results[0]}
        for load, results in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--front", choices=["haproxy", "none"], default="haproxy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory / "model")
        config = ServeAppConfig(
            model="./model", limits=LimitsConfig(max_tokens=TOKENS, queue=1000, batch=256)
        )
        spec = AppSpec("chat", config, str(directory / "model"), "costless@1", engine=ENGINE)
        section = f"gateway: {{front: {options.front}}}"
        with started(directory / "cluster", section) as cluster, Driver(cluster.record) as call:
            url = call(driver.start)
            call(driver.deploy, spec)
            rows = measure(url + "/v1/completions", options)
            call(driver.stop)
    if options.json:
        print(json.dumps(rows))
        return
    for load, row in rows.items():
        print(f"{load:>24}:  " + "  ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
