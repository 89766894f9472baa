"""Training tokens a second under Shoal beside plain torchrun, at 1 and 2 workers; run by hand.

    python tests/benchmarks/training_throughput.py [--json] [--strategies ddp fsdp] [--workers 1 2]
                                                   [--repeats 3] [--steps 16] [--alone]

Both train the same Llama on the same tokens with the same global batch in fp32, each worker on one thread.
They take turns (A B A B …) on an otherwise idle cluster, so that whatever else the machine does falls on
both. A run's figure is the median over its steps, the first quarter left out; the table shows the median over
the runs, and the median of the ratios of neighbouring runs. Evaluation, checkpoints and the start are not
part of a step, on either side.

With `--alone` there is no cluster at all, for either: the ranks of our job are plain processes too. What is
lost between that and the cluster goes to the processes of Ray, which share the cores with the ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.train import TrainJobConfig
from tests.clusters import LiveCluster, caller_environment, started
from tests.integration.jobs import JobFile, job_file, metrics
from tests.train_jobs.ranks import assemble, reports, run_program
from train_jobs.data.preparation import prepare_data
from train_jobs.spec import DATA

TIMEOUT_S = 600.0
NODES = ("nodes: [{name: head, cpus: 0}, {name: worker, cpus: 2}]", "storage: ./storage")
BATCH = {"global": 32, "micro": 8}
LENGTH = 256
MODEL = {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 4096}
LEARNING_RATE = 1.0e-3


JOB: dict[str, Any] = {
    "model": MODEL,
    "data": {"source": "python-stdlib", "sequence_length": LENGTH},
    "workers": {"cpus": 1},
    "batch": BATCH,
    "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "constant"},
    "evaluate": {"every_steps": None},
}


def shoal_job(live: LiveCluster, directory: Path, steps: int) -> JobFile:
    """One job; strategy and workers are set when it is started."""
    job = {**JOB, "steps": steps, "checkpoint": {"every_steps": steps}}
    return job_file(live, directory, {"job": job})


def with_shoal(jobs: JobFile, strategy: str, workers: int) -> tuple[list[float], dict[str, Any]]:
    """The seconds of each step, and the job's result."""
    settings = (f"parallel.strategy={strategy}", f"workers.min={workers}", f"workers.max={workers}")
    code, result = jobs.train("job", *(word for each in settings for word in ("--set", each)))
    if code != 0:
        raise SystemExit(f"the job failed: {result['error']}")
    run = Path(result["path"])
    # A profiled step is slower than others, and one in 200 of a long job; there are few steps here.
    return [line["step_s"] for line in metrics(run) if not line.get("profiled")], result


def step_alone(config_json: str, run: str) -> None:
    """On every rank of plain processes: our steps, and what rank 0 says of them."""
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    for _ in range(assembly.config.steps):
        assembly.loop.step()


def alone(directory: Path, strategy: str, workers: int, steps: int) -> tuple[list[float], dict[str, Any]]:
    """What `with_shoal` gives, without a cluster."""
    settings = {"parallel": {"strategy": strategy}, "steps": steps}
    config = TrainJobConfig.model_validate({**JOB, **settings})
    run = directory / "run"
    prepare_data(config, run / DATA)
    (run / "reports.jsonl").unlink(missing_ok=True)
    run_program(step_alone, run, workers, config.model_dump_json(by_alias=True), str(run))
    lines = [line for line in reports(run) if "step_s" in line]
    totals = {"communication": lines[-1]["communication"]}
    totals["data_wait"] = statistics.median(line["data_wait"] for line in lines)
    seconds = [line["step_s"] for line in lines if not line.get("profiled")]
    return seconds, {"path": str(run), "totals": totals}


def with_torchrun(directory: Path, tokens: Path, strategy: str, workers: int, steps: int) -> list[float]:
    """The seconds of each step of the plain script on the same tokens."""
    settings = {
        "strategy": strategy,
        "model": architecture(),
        "tokens": str(tokens),
        "sequence_length": LENGTH,
        "global_batch": BATCH["global"],
        "micro": BATCH["micro"],
        "steps": steps,
        "seed": 1,
        "learning_rate": LEARNING_RATE,
        "out": str(directory / "seconds.json"),
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("plain_training.py")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"),
            *(str(script), str(directory / "settings.json")),
        ],
        env={**caller_environment(), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=TIMEOUT_S,
        stderr=subprocess.DEVNULL,
    )
    return json.loads((directory / "seconds.json").read_text())


def tokens_per_s(seconds: list[float]) -> float:
    steady = seconds[len(seconds) // 4 :]
    return BATCH["global"] * LENGTH / statistics.median(steady)


def measure(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each strategy and number of workers."""
    cases = [(strategy, workers) for strategy in options.strategies for workers in options.workers]
    pairs: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    totals: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    (directory / "jobs").mkdir()
    with nullcontext() if options.alone else started(directory / "cluster", *NODES) as live:
        jobs = None if live is None else shoal_job(live, directory / "jobs", options.steps)
        for strategy, workers in cases * options.repeats:
            if jobs is None:
                ours, result = alone(directory, strategy, workers, options.steps)
            else:
                ours, result = with_shoal(jobs, strategy, workers)
            tokens = Path(result["path"]) / "data" / "train.npy"
            theirs = with_torchrun(directory, tokens, strategy, workers, options.steps)
            pair = tokens_per_s(ours), tokens_per_s(theirs)
            print(f"{strategy} {workers}: {pair[0]:.0f} {pair[1]:.0f}", file=sys.stderr, flush=True)
            pairs[strategy, workers].append(pair)
            totals[strategy, workers].append(result["totals"])
    return [row(*case, pairs[case], totals[case]) for case in cases]


def row(
    strategy: str, workers: int, pairs: list[tuple[float, float]], totals: list[dict[str, Any]]
) -> dict[str, Any]:
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "strategy": strategy,
        "workers": workers,
        "shoal_tokens_per_s": statistics.median(ours for ours, _ in pairs),
        "torchrun_tokens_per_s": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "communication": statistics.median(each["communication"] for each in totals),
        "data_wait": statistics.median(each["data_wait"] for each in totals),
    }


def architecture(model: dict[str, Any] = MODEL) -> dict[str, Any]:
    """A model of these sizes in LlamaConfig's words."""
    from cluster.config.sections.model import ModelConfig

    return {
        "hidden_size": model["hidden_size"],
        "intermediate_size": ModelConfig.model_validate(model).mlp_size,
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": ModelConfig().max_position_embeddings,
        "tie_word_embeddings": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--alone", action="store_true", help="no cluster: plain processes, on either side")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), options)
    if options.json:
        print(json.dumps({"steps": options.steps, "batch": BATCH, "sequence_length": LENGTH, "rows": rows}))
        return
    print(f"{'':8}  workers  {'shoal':>9}  {'torchrun':>9}  ratio (min–max)   comm.   wait    tokens/s")
    for each in rows:
        print(
            f"{each['strategy']:8}  {each['workers']:>7}  {each['shoal_tokens_per_s']:>9.0f}  "
            f"{each['torchrun_tokens_per_s']:>9.0f}  "
            f"{each['ratio']:.3f} ({each['ratio_min']:.2f}–{each['ratio_max']:.2f})  "
            f"{each['communication']:>5.1%}  {each['data_wait']:>5.2%}"
        )
    for strategy in options.strategies:
        scale = {each["workers"]: each for each in rows if each["strategy"] == strategy}
        if {1, 2} <= scale.keys():
            for name in ("shoal", "torchrun"):
                factor = scale[2][f"{name}_tokens_per_s"] / scale[1][f"{name}_tokens_per_s"]
                print(f"{strategy}, {name}: {factor:.2f} × one worker's on two")


if __name__ == "__main__":
    main()
