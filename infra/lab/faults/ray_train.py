"""Ray Train alone, beside which a job of one group is measured: `python -m infra.lab.faults.ray_train N`.

Two workers of one CPU under DDP that report and save nothing but what they must. One is killed N times; the
seconds from each SIGKILL to the next step of its successor are printed as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STEPS_BETWEEN = 40
_TIMEOUT_S = 120.0


def measure(environment: Mapping[str, str], repeats: int) -> list[float]:
    """Seconds from SIGKILL of a worker to its successor's first step, on the cluster of this environment."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(repeats)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60 + repeats * _TIMEOUT_S,
        check=True,
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _loop(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    model = ray.train.torch.prepare_model(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = ray.train.get_context().get_world_rank()
    with (Path(config["out"]) / f"{rank}.jsonl").open("a", buffering=1) as out:
        while True:
            optimizer.zero_grad()
            model(torch.randn(64, 256)).pow(2).mean().backward()
            optimizer.step()
            out.write(json.dumps([time.time(), os.getpid()]) + "\n")
            time.sleep(0.05)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray Train did no step within {_TIMEOUT_S:.0f} s")
        time.sleep(0.01)


def _kill_again_and_again(out: Path, repeats: int) -> list[float]:
    def rows(rank: int) -> list[tuple[float, int]]:
        path = out / f"{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]

    found = []
    _wait(lambda: len(rows(0)) > _STEPS_BETWEEN and len(rows(1)) > _STEPS_BETWEEN)
    for _ in range(repeats):
        victim = rows(1)[-1][1]
        began = time.time()
        os.kill(victim, signal.SIGKILL)

        def later(since: float = began, victim: int = victim) -> list[float]:
            return [when for when, pid in rows(1) if when > since and pid != victim]

        _wait(lambda later=later: bool(later()))  # type: ignore[misc]
        found.append(later()[0] - began)
        _wait(lambda later=later: len(later()) > _STEPS_BETWEEN)  # type: ignore[misc]
    return found


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # its workers still write
        out = Path(directory)
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        trainer = TorchTrainer(
            _loop,
            train_loop_config={"out": directory},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                storage_path=str(out / "ray"), failure_config=FailureConfig(max_failures=-1)
            ),
        )
        threading.Thread(target=trainer.fit, daemon=True).start()
        found = _kill_again_and_again(out, int(sys.argv[1]))
    print(json.dumps(found), flush=True)
    # Its workers end with it. Ray's own shutdown, while the other thread trains, now and then exits with 1.
    os._exit(0)


if __name__ == "__main__":
    main()
