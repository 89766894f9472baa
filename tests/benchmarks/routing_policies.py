"""What the five routing policies do to requests, on real replicas behind the real gateway; run by hand.

    python tests/benchmarks/routing_policies.py [--json] [--repeats 3] [--seconds 40] [--load 0.7]

Four replicas of a paced engine (continuous batching in simulated time, `paced_engine.py`), each a process of
Serve's with 8 requests at once, in three situations:

- `equal`: four alike; prompts of 64 tokens, no two the same;
- `unequal`: one has 0.4 of the others' speed;
- `prefixes`: four alike; prompts begin with one of 32 prefixes of 1024 tokens, of which the prefix cache of
  one replica holds 14, and end with 64 tokens of their own.

Open loop: requests arrive at random (Poisson) at `--load` of what all replicas together can do, counted
without any prefix cache, whatever has been answered; answers are heavy-tailed (Pareto of shape 1.5, from 8
tokens, at most 256). Within a repeat all policies get the same arrivals, each on an app started for it; the
order of the policies turns from repeat to repeat. The first `--warm-up` seconds are not counted.

Time to first token counts from when a request was due. Requests/s and tokens/s are of the answers that ended
in the counted seconds. `ratio` is the p99 beside least_connections', its median over the repeats; `shares`
are the smallest and the largest part of the requests that one replica took. `late` says how late the engines'
steps were on average: far below a step (40 ms), or the machine was too busy to be believed. `lag` is the p99
of the load generator's lateness; `gateway` and `generator` are the cores that the two processes took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.serve import ServeAppConfig
from serve_apps.routing import POLICIES
from serve_apps.spec import AppSpec
from tests.benchmarks.http_load import Answer, Ask, arrivals, open_loop, percentile
from tests.benchmarks.paced_engine import ENGINE, Notes, Pace
from tests.benchmarks.serving_processes import GENERATOR, CpuShares, serving_processes
from tests.clusters import started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.tiny_model import VOCAB_SIZE, make_tokenizer

REPLICAS = 4
BATCH = 8
OWN_TOKENS = 64
"""Tokens of a prompt that no other has."""
PREFIX_TOKENS = 1024
SHORTEST, LONGEST = 8, 256
SHAPE = 1.5
BESIDE = "least_connections"


@dataclass(frozen=True)
class Situation:
    """What the replicas and the prompts are like."""

    pace: Pace
    prefixes: int = 0
    """Kinds of prompts that begin alike; 0: all begin differently."""

    @property
    def prompt_tokens(self) -> int:
        return OWN_TOKENS + (PREFIX_TOKENS if self.prefixes else 0)

    @property
    def requests_per_s(self) -> float:
        """What all replicas can answer without a prefix cache."""
        speeds = self.pace.speeds if len(self.pace.speeds) > 1 else self.pace.speeds * REPLICAS
        return sum(speeds) / self.pace.busy_s(self.prompt_tokens, mean_answer(), BATCH)


SITUATIONS = {
    "equal": Situation(Pace()),
    "unequal": Situation(Pace(speeds=(1.0, 1.0, 1.0, 0.4))),
    "prefixes": Situation(Pace(cached_tokens=14 * (PREFIX_TOKENS + OWN_TOKENS)), prefixes=32),
}


def mean_answer() -> float:
    """Mean of `answer_tokens`, from many draws."""
    chance = random.Random(0)
    return statistics.fmean(answer_tokens(chance) for _ in range(20_000))


def answer_tokens(chance: random.Random) -> int:
    return min(LONGEST, int(SHORTEST * chance.paretovariate(SHAPE)))


def make_load(situation: Situation, load: float, seconds: float, seed: int) -> list[Ask]:
    """The arrivals of one repeat, the same for every policy."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1, VOCAB_SIZE - 50) for _ in range(count)]

    prefixes = [tokens(PREFIX_TOKENS) for _ in range(situation.prefixes)]

    def make(due_s: float) -> Ask:
        prefix = chance.choice(prefixes) if prefixes else []
        return Ask(due_s, [*prefix, *tokens(OWN_TOKENS)], answer_tokens(chance))

    return arrivals(load * situation.requests_per_s, seconds, chance, make)


def summary(answers: Sequence[Answer], warm_up_s: float, seconds: float) -> dict[str, Any]:
    """Of the requests that were due in the seconds after the warm-up, and the answers that ended in them."""
    counted = [each for each in answers if each.due_s >= warm_up_s]
    good = [each for each in counted if each.ok]
    if not good:
        raise SystemExit(f"nothing was answered; the first: {counted[:1]}")
    first = [each.first_token_s for each in good]
    whole = [each.ended_s - each.due_s for each in good]
    ended = [each for each in answers if each.ok and warm_up_s <= each.ended_s < warm_up_s + seconds]
    shares = Counter(each.replica for each in good)
    return {
        "requests": len(counted),
        "failed": len(counted) - len(good),
        "first_token_p50_ms": percentile(first, 0.5) * 1000,
        "first_token_p99_ms": percentile(first, 0.99) * 1000,
        "answer_p50_ms": percentile(whole, 0.5) * 1000,
        "answer_p99_ms": percentile(whole, 0.99) * 1000,
        "requests_per_s": len(ended) / seconds,
        "tokens_per_s": sum(each.tokens for each in ended) / seconds,
        "smallest_share": min(shares.values()) / len(good) if len(shares) == REPLICAS else 0.0,
        "largest_share": max(shares.values()) / len(good),
        "lag_p99_ms": percentile([each.lag_s for each in counted], 0.99) * 1000,
    }


def one(
    call: Driver, url: str, model: Path, policy: str, situation: Situation, asks: Sequence[Ask]
) -> tuple[list[Answer], dict[str, Any]]:
    """Deploy an app with a policy, put the load on it, take it down."""
    config = ServeAppConfig.model_validate(
        {
            "model": str(model),
            "engine_kwargs": situation.pace.kwargs(),
            "routing": policy,
            "replicas": {"min": REPLICAS, "max": REPLICAS},
            "limits": {"max_tokens": LONGEST, "queue": 2000, "batch": BATCH, "context_length": 4096},
        }
    )
    call(driver.deploy, AppSpec("chat", config, str(model), f"paced@{policy}", engine=ENGINE))
    deadline = time.monotonic() + driver.READY_TIMEOUT_S
    while call(driver.running_replicas, "chat") < REPLICAS:
        if time.monotonic() > deadline:
            raise SystemExit(f"{REPLICAS} replicas were not ready in time")
        time.sleep(0.5)
    time.sleep(2)  # what starting them left to do is no part of the measurement
    Notes.take(model)
    shares = CpuShares(serving_processes(call))
    answers = asyncio.run(open_loop(url, "chat", asks, time.perf_counter()))
    cores = shares.cores()
    time.sleep(1)  # the replicas' last notes
    notes = Notes.take(model)
    call(driver.remove, ["chat"])
    return answers, {
        "found_in_cache": notes.found,
        "step_late_ms": notes.late_ms,
        "step_latest_ms": notes.latest_ms,
        "gateway_cores": cores["gateway"],
        "load_generator_cores": cores[GENERATOR],
    }


def measure(call: Driver, url: str, model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each situation and policy: medians over the repeats."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for repeat in range(options.repeats):
        turn = repeat % len(options.policies)
        for name in options.situations:
            situation = SITUATIONS[name]
            asks = make_load(situation, options.load, options.warm_up + options.seconds, repeat + 1)
            for policy in options.policies[turn:] + options.policies[:turn]:
                answers, around = one(call, url, model, policy, situation, asks)
                run = {**summary(answers, options.warm_up, options.seconds), **around}
                runs.setdefault((name, policy), []).append(run)
                told = ", ".join(f"{key} {value:.3g}" for key, value in run.items())
                print(f"{repeat + 1} {name} {policy}: {told}", file=sys.stderr, flush=True)
    rows = []
    for name in options.situations:
        for policy in options.policies:
            mine = runs[name, policy]
            row = {key: statistics.median(run[key] for run in mine) for key in mine[0]}
            row["failed"] = sum(run["failed"] for run in mine)
            beside = runs.get((name, BESIDE))
            if beside is not None:
                pairs = zip(mine, beside, strict=True)
                ratios = [a["first_token_p99_ms"] / b["first_token_p99_ms"] for a, b in pairs]
                row["p99_ratio"] = statistics.median(ratios)
            rows.append({"situation": name, "policy": policy, "runs": len(mine), **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals that count, a run")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of arrivals before those")
    parser.add_argument("--load", type=float, default=0.7, help="part of what the replicas can do")
    parser.add_argument("--situations", nargs="+", choices=SITUATIONS, default=list(SITUATIONS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory / "model")
        nodes = "nodes: [{name: head, cpus: 0}, {name: worker, count: 2, cpus: 2}]"
        storage = "storage: ./storage"
        with started(directory / "cluster", nodes, storage) as cluster, Driver(cluster.record) as call:
            rows = measure(call, call(driver.start), directory / "model", options)
            call(driver.stop)
    if options.json:
        print(json.dumps({"load": options.load, "seconds": options.seconds, "rows": rows}))
        return
    print(
        f"{'situation':>9}  {'policy':<17}  {'TTFT p50':>8}  {'p99':>8}  {'ratio':>5}  {'answer p99':>10}  "
        f"{'req/s':>6}  {'tok/s':>6}  {'shares':>11}  {'cached':>6}  {'late':>7}  {'lag':>7}  "
        f"{'gateway':>7}  {'generator':>9}"
    )
    for row in rows:
        print(
            f"{row['situation']:>9}  {row['policy']:<17}  {row['first_token_p50_ms']:>5.0f} ms  "
            f"{row['first_token_p99_ms']:>5.0f} ms  {row.get('p99_ratio', float('nan')):>5.2f}  "
            f"{row['answer_p99_ms']:>7.0f} ms  {row['requests_per_s']:>6.1f}  {row['tokens_per_s']:>6.0f}  "
            f"{row['smallest_share']:>5.0%}–{row['largest_share']:<4.0%}  {row['found_in_cache']:>6.0%}  "
            f"{row['step_late_ms']:>4.1f} ms  {row['lag_p99_ms']:>4.0f} ms  {row['gateway_cores']:>7.2f}  "
            f"{row['load_generator_cores']:>9.2f}" + (f"  {row['failed']} failed" if row["failed"] else "")
        )


if __name__ == "__main__":
    main()
