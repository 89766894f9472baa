"""Training tokens a second under Shoal beside plain torchrun, at 1 and 2 workers; run by hand.

    python tests/benchmarks/training_throughput.py [--json] [--workers 1 2] [--repeats 3] [--steps 40]

Both train the same Llama (the sizes of `shoal init`) on the same tokens with the same global batch under DDP
in fp32, each worker on one thread. They take turns (A B A B …) on an otherwise idle cluster, so that whatever
else the machine does falls on both. A run's figure is the median over its steps, the first quarter left out;
the table shows the median over the runs, and the median of the ratios of neighbouring runs. Evaluation,
checkpoints and the start are not part of a step, on either side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.clusters import LiveCluster, caller_environment, started
from tests.integration.jobs import JobFile, job_file, metrics

TIMEOUT_S = 600.0
NODES = ("nodes: [{name: head, cpus: 0}, {name: worker, cpus: 2}]", "storage: ./storage")
BATCH = {"global": 16, "micro": 8}
LENGTH = 128
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 2048}
LEARNING_RATE = 3.0e-3


def shoal_jobs(live: LiveCluster, directory: Path, steps: int, workers: list[int]) -> JobFile:
    """One job for each number of workers."""
    job: dict[str, Any] = {
        "model": MODEL,
        "data": {"source": "python-stdlib", "sequence_length": LENGTH},
        "parallel": {"strategy": "ddp"},
        "batch": BATCH,
        "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "constant"},
        "steps": steps,
        "evaluate": {"every_steps": None},
        "checkpoint": {"every_steps": steps},
    }
    jobs = {f"ddp-{count}": {**job, "workers": {"min": count, "max": count, "cpus": 1}} for count in workers}
    return job_file(live, directory, jobs)


def with_shoal(jobs: JobFile, workers: int) -> tuple[list[float], Path]:
    """The seconds of each step, and the run's directory."""
    code, result = jobs.train(f"ddp-{workers}")
    if code != 0:
        raise SystemExit(f"the job failed: {result['error']}")
    run = Path(result["path"])
    return [line["step_s"] for line in metrics(run)], run


def with_torchrun(directory: Path, tokens: Path, architecture: dict[str, Any], steps: int, workers: int):
    """The seconds of each step of the plain script on the same tokens."""
    settings = {
        "model": architecture,
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
    script = Path(__file__).with_name("plain_ddp.py")
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


def measure(directory: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """One row for each number of workers."""
    rows = []
    with started(directory / "cluster", *NODES) as live:
        (directory / "jobs").mkdir()
        jobs = shoal_jobs(live, directory / "jobs", options.steps, options.workers)
        for workers in options.workers:
            pairs = []
            for _ in range(options.repeats):
                ours, run = with_shoal(jobs, workers)
                newest = max((run / "checkpoints").iterdir())
                assert newest.name == f"step-{options.steps:08d}"
                theirs = with_torchrun(
                    directory, run / "data" / "train.npy", architecture(), options.steps, workers
                )
                pairs.append((tokens_per_s(ours), tokens_per_s(theirs)))
            rows.append(
                {
                    "workers": workers,
                    "shoal_tokens_per_s": statistics.median(ours for ours, _ in pairs),
                    "torchrun_tokens_per_s": statistics.median(theirs for _, theirs in pairs),
                    "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
                    "ratio_min": min(ours / theirs for ours, theirs in pairs),
                    "ratio_max": max(ours / theirs for ours, theirs in pairs),
                }
            )
    return rows


def architecture() -> dict[str, Any]:
    """The same model in LlamaConfig's words."""
    from cluster.config.model_section import ModelConfig

    return {
        "hidden_size": MODEL["hidden_size"],
        "intermediate_size": ModelConfig.model_validate(MODEL).mlp_size,
        "num_hidden_layers": MODEL["num_layers"],
        "num_attention_heads": MODEL["num_heads"],
        "num_key_value_heads": MODEL["num_kv_heads"],
        "vocab_size": MODEL["vocab_size"],
        "max_position_embeddings": ModelConfig().max_position_embeddings,
        "tie_word_embeddings": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), options)
    if options.json:
        print(json.dumps({"steps": options.steps, "batch": BATCH, "sequence_length": LENGTH, "rows": rows}))
        return
    print(f"{'workers':>7}  {'shoal':>9}  {'torchrun':>9}  ratio (min–max)      tokens/s, DDP, fp32")
    for row in rows:
        print(
            f"{row['workers']:>7}  {row['shoal_tokens_per_s']:>9.0f}  {row['torchrun_tokens_per_s']:>9.0f}  "
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})"
        )
    scale = {row["workers"]: row for row in rows}
    if {1, 2} <= scale.keys():
        for name in ("shoal", "torchrun"):
            factor = scale[2][f"{name}_tokens_per_s"] / scale[1][f"{name}_tokens_per_s"]
            print(f"{name}: {factor:.2f} × one worker's on two")


if __name__ == "__main__":
    main()
