"""A hundred thousand small requests, and what the processes that serve them keep of each; run by hand.

    python tests/benchmarks/endurance.py [--json] [--requests 100000] [--clients 32] [--bound-bytes 100]

Two replicas of two ranks of the torch engine with a tiny model, behind the gateway; clients that ask one
thing after the other. Of 100 requests 44 are whole answers, 44 streams, 4 streams that the client leaves
after the first tokens, 2 whole ones that it leaves after some milliseconds, and 6 are refused: an unknown
model, too many tokens, a body that is no JSON, a prompt that is too long (the replica says so), and more
choices than there are places (429). A request that ends otherwise counts as wrong.

Memory of every process is looked at every `--every` seconds: RSS, and USS, which leaves out what is shared
with others (libraries, Ray's object store). The table gives both after 10, 50 and 100 % of the requests, the
open files, and the slope in bytes a request by least squares over the second half. A process is flat when the
slope of its USS is below `--bound-bytes`. Each repeat goes on with the same processes. Ends with 1 when
something was wrong or not flat, or places of the gateway were not given back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.serve import ServeAppConfig
from serve_apps.spec import AppSpec
from tests.benchmarks.http_load import session
from tests.benchmarks.serving_processes import GENERATOR, CpuShares, ServingProcess, serving_processes, told
from tests.clusters import started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.tiny_model import make_model

REPLICAS, RANKS = 2, 2
BATCH, QUEUE = 16, 16
PLACES = REPLICAS * BATCH + QUEUE
MOST_TOKENS = 16
CONTEXT = 128
KINDS = {
    "whole": 44,
    "streamed": 44,
    "left in the stream": 4,
    "left at once": 2,
    "unknown model": 1,
    "too many tokens": 1,
    "no JSON": 1,
    "too long": 1,
    "no place": 2,
}
"""Kinds of requests, by how many of a hundred."""
REFUSALS = {
    "unknown model": (404,),
    "too many tokens": (400,),
    "no JSON": (400,),
    "too long": (400,),
    # When nothing else runs there is room even for this one.
    "no place": (429, 200),
}
SETTLE_S = 30.0
NOT_JUDGED = ("gcs_server", "raylet")
"""Ray's own, which keep a bounded history of tasks."""
FLAT = {True: "yes", False: "NO", None: "-"}


@dataclass(frozen=True)
class Memory:
    """One process at one moment."""

    requests: int
    """That had ended by then."""
    rss_bytes: int
    uss_bytes: int
    files: int


@dataclass
class Progress:
    """What has become of the requests so far."""

    ended: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def request(http: aiohttp.ClientSession, url: str, kind: str, chance: random.Random) -> str:
    """Send one request of a kind; what became of it, or (beginning with `wrong`) what should not have."""
    body: dict[str, Any] = {
        "model": "chat",
        "prompt": [chance.randrange(1, 250) for _ in range(chance.randint(1, 24))],
        "max_tokens": chance.randint(1, 8),
        "temperature": 0 if chance.random() < 0.5 else 1,
        "ignore_eos": True,
    }
    if kind == "unknown model":
        body["model"] = "nobody"
    elif kind == "too many tokens":
        body["max_tokens"] = MOST_TOKENS + 1
    elif kind == "too long":
        body["prompt"] = [5] * (CONTEXT + 1)
    elif kind == "no place":
        body["n"] = PLACES
    elif kind in ("streamed", "left in the stream"):
        body["stream"] = True
    if kind.startswith("left"):
        body["max_tokens"] = MOST_TOKENS
    data = b"{" if kind == "no JSON" else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    post = http.post(f"{url}/v1/completions", data=data, headers=headers)
    if kind == "left at once":
        try:
            async with asyncio.timeout(chance.uniform(0.001, 0.05)), post as response:
                await response.read()
        except TimeoutError:
            return "left"
        return str(response.status) if response.status == 200 else f"wrong: {response.status}"
    async with post as response:
        if kind == "left in the stream":
            await response.content.readany()
            response.close()
            return "left" if response.status == 200 else f"wrong: {response.status}"
        content = await response.read()
    if response.status not in REFUSALS.get(kind, (200,)):
        return f"wrong: {response.status} {content[:300].decode(errors='replace')}"
    if kind == "streamed" and not content.endswith(b"data: [DONE]\n\n"):
        return f"wrong: the stream broke off: {content[-300:].decode(errors='replace')}"
    return str(response.status)


async def load(url: str, options: argparse.Namespace, seed: int, progress: Progress) -> None:
    chance = random.Random(seed)
    kinds = iter(chance.choices(list(KINDS), list(KINDS.values()), k=options.requests))

    async def client(http: aiohttp.ClientSession) -> None:
        for kind in kinds:
            try:
                outcome = await request(http, url, kind, chance)
            except (aiohttp.ClientError, TimeoutError) as error:
                outcome = f"wrong: {error!r}"
            if outcome.startswith("wrong"):
                progress.wrong.append(f"{kind}: {outcome}")
                outcome = "wrong"
            progress.outcomes[f"{kind}: {outcome}"] += 1
            progress.ended += 1

    async with session() as http:
        await asyncio.gather(*(client(http) for _ in range(options.clients)))


def look(processes: Sequence[ServingProcess], requests: int) -> dict[ServingProcess, Memory]:
    """The memory of the processes that are still there."""
    found = {}
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(each.pid)
            memory = process.memory_full_info()
            found[each] = Memory(requests, memory.rss, memory.uss, process.num_fds())
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through the points, by least squares; 0 of fewer than three."""
    if len(points) < 3:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def row_of(process: ServingProcess, seen: Sequence[Memory], options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""

    def at(part: float) -> Memory:
        return min(seen, key=lambda memory: abs(memory.requests - part * options.requests))

    half = [memory for memory in seen if memory.requests >= options.requests / 2]
    uss_slope = slope([(memory.requests, memory.uss_bytes) for memory in half])
    return {
        "role": process.role,
        "pid": process.pid,
        **{f"uss_{part}_bytes": at(part / 100).uss_bytes for part in (10, 50, 100)},
        **{f"rss_{part}_bytes": at(part / 100).rss_bytes for part in (10, 50, 100)},
        "files_10": at(0.1).files,
        "files_100": at(1.0).files,
        "looks": len(half),
        "uss_slope_bytes_per_request": uss_slope,
        "rss_slope_bytes_per_request": slope([(memory.requests, memory.rss_bytes) for memory in half]),
        "flat": None if process.role in NOT_JUDGED else uss_slope < options.bound_bytes,
    }


async def places_taken(url: str) -> float:
    """What the gateway's metrics say is in flight, once nothing is any more (or the wait is over)."""
    deadline = time.monotonic() + SETTLE_S
    async with session() as http:
        while True:
            async with http.get(f"{url}/metrics") as response:
                lines = (await response.text()).splitlines()
            taken = sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("shoal_gateway_in_flight{"))
            if not taken or time.monotonic() > deadline:
                return taken
            await asyncio.sleep(0.5)


def measure(
    processes: Sequence[ServingProcess], url: str, options: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """One repeat: all requests, and the memory meanwhile."""
    progress = Progress()
    seen: dict[ServingProcess, list[Memory]] = {each: [] for each in processes}
    stop = threading.Event()

    def look_again() -> None:
        for each, memory in look(processes, progress.ended).items():
            seen[each].append(memory)

    def watch() -> None:
        while not stop.wait(options.every):
            look_again()
            done = progress.ended / options.requests
            print(f"\r{done:6.1%}, {len(progress.wrong)} wrong ", end="", file=sys.stderr, flush=True)

    watching = threading.Thread(target=watch)
    shares = CpuShares(processes)
    began = time.perf_counter()
    watching.start()
    try:
        asyncio.run(load(url, options, seed, progress))
    finally:
        took = time.perf_counter() - began
        cores = shares.cores()
        stop.set()
        watching.join()
        print(file=sys.stderr)
    taken = asyncio.run(places_taken(url))
    look_again()
    return {
        "requests": options.requests,
        "requests_per_s": options.requests / took,
        "outcomes": dict(sorted(progress.outcomes.items())),
        "wrong": len(progress.wrong),
        "examples": progress.wrong[:5],
        "places_not_given_back": taken,
        "ended_processes": len(processes) - len(look(processes, 0)),
        "cores": cores,
        "load_generator_cores": cores[GENERATOR],
        "rows": [row_of(each, seen[each], options) for each in processes if seen[each]],
    }


def print_table(found: dict[str, Any], options: argparse.Namespace) -> None:
    print(
        f"{found['requests']} requests, {found['requests_per_s']:.0f}/s, {found['wrong']} wrong; places not "
        f"given back: {found['places_not_given_back']:.0f}; processes that ended: {found['ended_processes']}"
    )
    print(", ".join(f"{what} {count}" for what, count in found["outcomes"].items()))
    for example in found["examples"]:
        print(f"  {example}")
    print(f"cores: {told(found['cores'])}")
    print(
        f"{'process':>16}  {'USS 10 %':>9} {'50 %':>9} {'100 %':>9}  {'RSS 10 %':>9} {'50 %':>9} {'100 %':>9}"
        f"  {'files':>9}  {'bytes/request':>13}  flat (< {options.bound_bytes:g})"
    )
    for row in found["rows"]:
        uss = " ".join(f"{row[f'uss_{part}_bytes'] / 2**20:>6.1f} MB" for part in (10, 50, 100))
        rss = " ".join(f"{row[f'rss_{part}_bytes'] / 2**20:>6.1f} MB" for part in (10, 50, 100))
        print(
            f"{row['role']:>16}  {uss}  {rss}  {row['files_10']:>4}→{row['files_100']:<4}  "
            f"{row['uss_slope_bytes_per_request']:>13.1f}  {FLAT[row['flat']]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=1, help="of all requests, on the same processes")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks at the memory")
    parser.add_argument("--bound-bytes", type=float, default=100.0, help="of a request, over the second half")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_model(directory / "model")
        config = ServeAppConfig.model_validate(
            {
                "model": str(model),
                "tensor": RANKS,
                "replicas": {"min": REPLICAS, "max": REPLICAS},
                "limits": {"max_tokens": MOST_TOKENS, "queue": QUEUE, "batch": BATCH},
            }
        )
        with started(directory / "cluster") as cluster, Driver(cluster.record) as call:
            url = call(driver.start)
            call(driver.deploy, AppSpec("chat", config, str(model), "tiny@1"))
            deadline = time.monotonic() + driver.READY_TIMEOUT_S
            while call(driver.running_replicas, "chat") < REPLICAS:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{REPLICAS} replicas were not ready in time")
                time.sleep(0.5)
            processes = serving_processes(call)
            for role in NOT_JUDGED:
                pids = [each.pid for each in cluster.processes(role) if each.name() == role]
                processes += [ServingProcess(role, "", pid) for pid in pids]
            found = []
            for repeat in range(options.repeats):
                found.append(measure(processes, url, options, repeat + 1))
                if not options.json:
                    print_table(found[-1], options)
            call(driver.stop)
    if options.json:
        print(json.dumps({"bound_bytes": options.bound_bytes, "repeats": found}))
    bad = any(
        each["wrong"]
        or each["places_not_given_back"]
        or each["ended_processes"]
        or any(row["flat"] is False for row in each["rows"])
        for each in found
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
