"""Ray Tune by itself: a grid of learning rates, in the style of its guide on fault tolerance."""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from ray import tune

RATES = {"low": 0.01, "middle": 0.1, "high": 0.5}


def objective(config):
    lr = RATES[config["rate"]]
    weight, start = 0.0, 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            saved = json.loads(Path(directory, "state.json").read_text())
        weight, start = saved["weight"], saved["step"] + 1
        print(f"restored {config['rate']}, from step {start} on", flush=True)
    for step in range(start, config["steps"]):
        weight += lr * (1.0 - weight)
        time.sleep(config["delay"])
        if step == config["exit_at"]:
            raise ValueError("asked to fail")
        print(f"{config['rate']}, step {step}, pid {os.getpid()}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state.json").write_text(json.dumps({"weight": weight, "step": step}))
            tune.report(
                {"score": abs(1.0 - weight), "step": step},
                checkpoint=tune.Checkpoint.from_directory(directory),
            )


parser = argparse.ArgumentParser()
parser.add_argument("--storage", required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--exit-at", type=int, default=-1)
args = parser.parse_args()
tuner = tune.Tuner(
    tune.with_resources(objective, {"cpu": 1}),
    param_space={"rate": tune.grid_search(list(RATES)), **vars(args)},
    run_config=tune.RunConfig(
        name="search",
        storage_path=args.storage,
        failure_config=tune.FailureConfig(max_failures=0 if args.exit_at >= 0 else 3),
    ),
)
results = tuner.fit()
if results.num_errors:
    print(f"failed: {results.errors[0]}", flush=True)
    sys.exit(3)
best = results.get_best_result("score", "min")
print(f"{len(results)} trials, best {best.config['rate']}, step {best.metrics['step']}", flush=True)
