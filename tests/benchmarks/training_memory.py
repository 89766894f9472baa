"""Memory of a rank by strategy, measured beside what theory says; run by hand.

    python tests/benchmarks/training_memory.py [--json] [--workers 2 4]
                                               [--strategies ddp zero1 zero2 fsdp zero3]

A Llama of over 100M parameters with AdamW in fp32, on CPUs. Its batch is tiny, so that activations are next
to nothing. Each rank is a process of its own, and steps a tiny model first: what libraries and process groups
take is taken off. The resident memory is read between steps, and its highest mark in a step; the figures are
medians over five steps and all ranks.

Theory, with p the bytes of the parameters (their gradients need as much, AdamW's two means twice as much), u
those of the largest block, r those outside of blocks, and N ranks:

    ddp    4p            parameters, gradients, both means
    zero1  2p + 2p/N     the means are sharded. + b/N + 2b: stepped parameters, gathered b = 34 MB at a time
    zero2  p + 3p/N      parameters gathered and sharded, and the means; a block's gathered parameters go
                         when its gradients come. + 2u: gradients before they are reduced, and on their way
    fsdp   4p/N          + 4u + 2r: two blocks gathered, of which one is on its way; gradients as in zero2;
                         what is outside of blocks stays gathered to the end of the backward, with its
                         gradients

gloo holds what it all-gathers and reduce-scatters once more, while it does: + 2u in zero2 and fsdp, in
zero1 it is in the 2b (measured: 100 MB for 100 MB gathered or scattered, 2 MB where all-reduced).

Between steps, ddp and zero1 keep their gradients' buckets; zero2 and fsdp keep 3p/N, parameters and means.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, run_program
from train_jobs.data.preparation import prepare_data
from train_jobs.parallel.zero1 import BUCKET_ELEMENTS
from train_jobs.spec import DATA

JOB: dict[str, Any] = {
    "model": {"hidden_size": 512, "num_layers": 36, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 2048},
    "data": {"source": "python-stdlib", "sequence_length": 16},
    "steps": 100,
}
_FIRST_STEPS = 5
"""They make buffers, and one of them is profiled."""


def measure(config_json: str, run: str) -> None:
    """On every rank: what it holds at rest and at most, beyond what it held before the model was built."""
    import torch.distributed as dist

    config = TrainJobConfig.model_validate_json(config_json)
    tiny = config.model.model_copy(update={"hidden_size": 64, "num_layers": 1})
    assembly = assemble(config.model_copy(update={"model": tiny}), Path(run))
    for _ in range(_FIRST_STEPS):
        assembly.loop.step()
    del assembly
    dist.barrier()
    before = _settled()
    assembly = assemble(config, Path(run))
    for _ in range(_FIRST_STEPS):
        assembly.loop.step()
    mine = []
    for _ in range(5):
        resting = _settled() - before
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
        assembly.loop.step()
        mine.append((resting, _status("VmHWM") - before))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    resting, peak = (statistics.median(each) for each in zip(*chain.from_iterable(found), strict=True))
    module = assembly.parallel.stepped
    sizes = {name: 4 * parameter.numel() for name, parameter in module.named_parameters()}
    if dist.get_rank() == 0:
        block = sum(size for name, size in sizes.items() if ".layers.0." in name)
        rest = sum(size for name, size in sizes.items() if ".layers." not in name)
        figures = {"parameters": sum(sizes.values()), "block": block, "rest": rest}
        (Path(run) / "figures.json").write_text(json.dumps({**figures, "resting": resting, "peak": peak}))


def theory(strategy: str, workers: int, p: float, u: float, r: float) -> tuple[float, float]:
    """Bytes of a rank at rest and at most."""
    n, b = workers, 4 * BUCKET_ELEMENTS
    if strategy == "ddp":
        return 4 * p, 4 * p
    if strategy == "zero1":
        return 2 * p + 2 * p / n, 2 * p + 2 * p / n + b / n + 2 * b
    if strategy == "zero2":
        return 3 * p / n, p + 3 * p / n + 4 * u
    return 3 * p / n, 4 * p / n + 6 * u + 2 * r


def _status(name: str) -> int:
    """Bytes of a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _settled() -> int:
    """Resident memory, once what was freed is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1", "zero2", "fsdp", "zero3"])
    options = parser.parse_args()
    # Freed tensors go back to the system at once: what is resident is what is held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for workers in options.workers:
            for strategy in options.strategies:
                settings = {"parallel": {"strategy": strategy}, "batch": {"global": workers, "micro": 1}}
                config = TrainJobConfig.model_validate({**JOB, **settings})
                run = Path(directory) / f"{strategy}-{workers}"
                prepare_data(config, run / DATA)
                run_program(measure, run, workers, config.model_dump_json(by_alias=True), str(run))
                found = json.loads((run / "figures.json").read_text())
                resting, peak = theory(strategy, workers, found["parameters"], found["block"], found["rest"])
                rows.append(
                    {"strategy": strategy, "workers": workers, **found}
                    | {"resting_theory": resting, "peak_theory": peak}
                )
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{rows[0]['parameters'] / 4e6:.0f}M parameters, fp32, AdamW; MB of a rank (theory, ratio to it)")
    print("strategy  ranks  between steps           at most in a step")
    for row in rows:
        cells = [
            f"{row[name] / 1e6:>5.0f} ({row[f'{name}_theory'] / 1e6:>5.0f}, "
            f"{row[name] / row[f'{name}_theory']:.2f})"
            for name in ("resting", "peak")
        ]
        print(f"{row['strategy']:8}  {row['workers']:>5}  {cells[0]:20}  {cells[1]}")


if __name__ == "__main__":
    main()
