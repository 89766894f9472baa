"""vLLM behind Shoal's gateway beside vLLM's own OpenAI server, on the same load; run by hand.

    python tests/benchmarks/vllm_gateway.py [--json] [--repeats 2] [--runs 2] [--eager] [--profile DIRECTORY]

Both serve the same Llama of about 28 million random weights (that of engine_throughput.py) in bf16 with the
same settings: A is a cluster of a head and a node with one app of `engine: vllm`, B is `vllm serve`. They
take turns (A B A B …), and only one of them is up at a time; each has a run before those that count. The load
is that of `vllm bench serve`: random prompts and answers of fixed lengths, streamed, at most 32 at a time.
Every answer must have all its tokens.

Both run their engine's threads on the same cores: those of VLLM_CPU_OMP_THREADS_BIND, the first one by
default. Everything else (vLLM's scheduler, servers, gateway, the cluster, the load generator) is bound to the
other cores. The figures are medians over all runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from serve_apps.engine import process_guard
from tests.benchmarks.engine_throughput import save_model
from tests.clusters import caller_environment, shoal_command, started

CONTEXT = 512
BATCH = 32
CACHE_GIB = 0.5
UP_TIMEOUT_S = 600.0

# vLLM's command line asks for the version of a package `vllm`; on a CPU that is another.
VLLM = """
import importlib.metadata as metadata
version = metadata.version
def found(name):
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return version("vllm-cpu") + "+cpu"
metadata.version = found
from vllm.entrypoints.cli.main import main
main()
"""

APP = """serve_apps:
  chat:
    model: {model}
    engine: vllm
    engine_kwargs: {{enforce_eager: {eager}}}
    precision: bf16
    cpus: 1
    kv_cache: {{memory_gib: {cache}, prefix_caching: false}}
    limits: {{context_length: {context}, batch: {batch}, max_tokens: {context}}}
"""

METRICS = {
    "output_tokens_per_s": "output_throughput",
    "requests_per_s": "request_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "median_tpot_ms",
}
"""By our name: the field of the result of `vllm bench serve`."""


@contextmanager
def shoal(model: Path, directory: Path, eager: bool) -> Iterator[str]:
    """A cluster that serves the model; its URL."""
    nodes = "nodes: [{name: head, cpus: 0}, {name: worker, cpus: 1}]"
    with started(directory, nodes, "storage: ./storage") as cluster:
        path = cluster.config_path
        app = APP.format(model=model, eager=str(eager).lower(), cache=CACHE_GIB, context=CONTEXT, batch=BATCH)
        path.write_text(path.read_text() + app)
        served = subprocess.run(
            shoal_command("serve", "--json", "-f", str(path)),
            env=caller_environment(),
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
        )
        if served.returncode:
            raise SystemExit(served.stderr)
        yield json.loads(served.stdout)["base_url"].removesuffix("/v1")


@contextmanager
def vllm(model: Path, directory: Path, eager: bool) -> Iterator[str]:
    """vLLM's own server of the model; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "--served-model-name": "chat",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--max-model-len": str(CONTEXT),
        "--max-num-seqs": str(BATCH),
        "--kv-cache-memory-bytes": str(int(CACHE_GIB * 2**30)),
        "--scheduling-policy": "priority",
    }
    words = [word for pair in arguments.items() for word in pair]
    flags = ["--no-enable-prefix-caching", *(["--enforce-eager"] if eager else [])]
    directory.mkdir(parents=True)
    with open(directory / "vllm.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", VLLM, "serve", str(model), *words, *flags], stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(url, server, directory / "vllm.log")
        yield url
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = process_guard.with_descendants([psutil.Process(server.pid)])
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            process_guard.kill(family, 30)
        server.wait()


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + UP_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"vLLM's server does not come up: {log.read_text()[-2000:]}")


SERVERS: dict[str, Callable[[Path, Path, bool], AbstractContextManager[str]]] = {"shoal": shoal, "vllm": vllm}


def bench(
    url: str, model: Path, directory: Path, options: argparse.Namespace, prompts: int
) -> dict[str, float]:
    """One run of the load generator."""
    directory.mkdir(parents=True, exist_ok=True)
    result = directory / "result.json"
    arguments = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": "chat",
        "--tokenizer": str(model),
        "--dataset-name": "random",
        "--random-input-len": str(options.input_tokens),
        "--random-output-len": str(options.output_tokens),
        "--num-prompts": str(prompts),
        "--max-concurrency": str(BATCH),
        "--temperature": "0",
        "--result-filename": str(result),
    }
    words = [word for pair in arguments.items() for word in pair]
    flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
    done = subprocess.run(
        [sys.executable, "-c", VLLM, "bench", "serve", *words, *flags], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    found: dict[str, Any] = json.loads(result.read_text())
    expected = prompts * options.output_tokens
    if (found["completed"], found["total_output_tokens"]) != (prompts, expected):
        raise SystemExit(
            f"{url} gave {found['total_output_tokens']} of {expected} tokens for {found['completed']} of "
            f"{prompts} requests; this compares nothing: {done.stdout[-1000:]}"
        )
    return {name: found[field] for name, field in METRICS.items()}


def profile(directory: Path, name: str) -> list[subprocess.Popen[bytes]]:
    """Record where the time of a server's processes goes for 20 s (with py-spy, as root)."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ("replica", "gateway", "VLLM::EngineCore", "serve")
    recorders = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.pid != os.getpid() and command.startswith(("ray::ServeReplica", "VLLM::", sys.executable)):
            kind = next((word for word in words if word in command), None)
            if kind is not None:
                file = directory / f"{name}-{kind.replace('::', '-')}-{process.pid}.txt"
                command_line = [
                    "py-spy",
                    "record",
                    "-d",
                    "20",
                    "-f",
                    "raw",
                    "-o",
                    str(file),
                    "-p",
                    str(process.pid),
                ]
                recorders.append(subprocess.Popen(command_line, stdout=subprocess.DEVNULL))
    return recorders


def measure(model: Path, directory: Path, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All runs of both servers."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
    for repeat in range(options.repeats):
        for name, server in SERVERS.items():
            place = directory / f"{name}-{repeat}"
            with server(model, place / "server", options.eager) as url:
                bench(url, model, place, options, BATCH)
                recorders = profile(options.profile, name) if options.profile and not repeat else []
                for _ in range(options.runs):
                    runs[name].append(bench(url, model, place, options, options.prompts))
                    print(name, json.dumps(runs[name][-1]), file=sys.stderr, flush=True)
                for recorder in recorders:
                    recorder.wait()
            shutil.rmtree(place, ignore_errors=True)
    return runs


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of both, and what part of vLLM's tokens/s comes through the gateway."""
    medians = {
        name: {metric: statistics.median(run[metric] for run in each) for metric in METRICS}
        for name, each in runs.items()
    }
    rate = "output_tokens_per_s"
    neighbours = [a[rate] / b[rate] for a, b in zip(runs["shoal"], runs["vllm"], strict=True)]
    return {
        **medians,
        "ratio": medians["shoal"][rate] / medians["vllm"][rate],
        "ratio_min": min(neighbours),
        "ratio_max": max(neighbours),
    }


def leave_the_engines_cores() -> None:
    """Bind this process, and all that it starts, to the cores that no thread of an engine is bound to."""
    engine: set[int] = set()
    for part in os.environ["VLLM_CPU_OMP_THREADS_BIND"].replace("|", ",").split(","):
        first, _, last = part.partition("-")
        engine.update(range(int(first), int(last or first) + 1))
    others = os.sched_getaffinity(0) - engine
    if not others:
        raise SystemExit("all cores are the engine's; VLLM_CPU_OMP_THREADS_BIND must leave one")
    os.sched_setaffinity(0, others)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--repeats", type=int, default=2, help="how often each server is started")
    parser.add_argument("--runs", type=int, default=2, help="runs of the load on a server that is up")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="without torch.compile, which starts sooner")
    parser.add_argument(
        "--profile", type=Path, help="directory for py-spy's records of the first run of each"
    )
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    leave_the_engines_cores()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        save_model(model)
        result = summary(measure(model, Path(name), options))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'':>7}" + "".join(f"{metric:>22}" for metric in METRICS))
    for name in SERVERS:
        print(f"{name:>7}" + "".join(f"{result[name][metric]:>22.1f}" for metric in METRICS))
    print(
        f"tokens/s through the gateway: {result['ratio']:.2f} of vLLM's own server's"
        f" (neighbouring runs {result['ratio_min']:.2f}–{result['ratio_max']:.2f})"
    )


if __name__ == "__main__":
    main()
