"""How long a checkpoint keeps training standing, saved in the background and in the foreground; run by hand.

    python tests/benchmarks/checkpoint_stall.py [--json] [--strategies ddp fsdp] [--workers 2] [--repeats 5]

Both kinds save the same state (a Llama with AdamW, at least 500 MB over all ranks) and take turns (A B A B …)
in one process group. The stall is what a step waits: for the call that saves, and before the optimizer for
the copy to be made. The delay is by how much the steps are late until the checkpoint counts, against as many
steps without a save: with all cores busy, writing in the background takes time from computing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, run_program
from train_jobs.data.preparation import prepare_data
from train_jobs.spec import DATA

JOB: dict[str, Any] = {
    "model": {"hidden_size": 640, "num_layers": 8, "num_heads": 8, "vocab_size": 8192},
    "data": {"source": "python-stdlib", "sequence_length": 256},
    "batch": {"global": 8, "micro": 4},
    "steps": 1000,
    "checkpoint": {"keep": 1, "asynchronous": True},
}
KINDS = ("foreground", "background")
BASELINE_STEPS = 3


def measure(config_json: str, run: str, repeats: int) -> None:
    """On every rank: saves in turn, and the steps around them."""
    import torch.distributed as dist

    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    loop, saver, store = assembly.loop, assembly.saver, assembly.store
    configs = {kind: saver.config.model_copy(update={"asynchronous": kind == "background"}) for kind in KINDS}

    def timed_step() -> float:
        began = time.perf_counter()
        loop.step()
        return time.perf_counter() - began

    lines: list[dict[str, Any]] = []
    for _ in range(3):
        timed_step()
    for kind in KINDS * (repeats + 1):
        usual = statistics.median(timed_step() for _ in range(BASELINE_STEPS))
        saver.config = configs[kind]
        dist.barrier()
        began = time.perf_counter()
        saver.save()
        steps = 0
        while steps == 0 or saver.saving:
            loop.step()
            saver.poll()
            steps += 1
        delay = time.perf_counter() - began - steps * usual
        saver.finish()
        stalls: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stalls, saver.stalled_s)
        lines.append(
            {"kind": kind, "stall_s": max(stalls), "delay_s": delay, "steps": steps, "step_s": usual}
        )
    newest = store.look(loop.state.step - lines[-1]["steps"])
    assert newest.complete, "the last save does not count"
    assert newest.manifest is not None, "a complete checkpoint has one"
    size = sum(fact.size_bytes for fact in newest.manifest.files.values())
    if dist.get_rank() == 0:
        # The first of each kind makes memory and process groups that the others find.
        (Path(run) / "lines.json").write_text(json.dumps({"bytes": size, "lines": lines[len(KINDS) :]}))


def row(strategy: str, workers: int, found: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {"strategy": strategy, "workers": workers, "bytes": found["bytes"]}
    for kind in KINDS:
        mine = [line for line in found["lines"] if line["kind"] == kind]
        figures[f"{kind}_stall_s"] = statistics.median(line["stall_s"] for line in mine)
        figures[f"{kind}_delay_s"] = statistics.median(line["delay_s"] for line in mine)
        figures[f"{kind}_stall_max_s"] = max(line["stall_s"] for line in mine)
    figures["step_s"] = statistics.median(line["step_s"] for line in found["lines"])
    figures["ratio"] = figures["background_stall_s"] / figures["foreground_stall_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for strategy in options.strategies:
            config = TrainJobConfig.model_validate({**JOB, "parallel": {"strategy": strategy}})
            run = Path(directory) / strategy
            prepare_data(config, run / DATA)
            arguments = (config.model_dump_json(by_alias=True), str(run), options.repeats)
            run_program(measure, run, options.workers, *arguments)
            rows.append(row(strategy, options.workers, json.loads((run / "lines.json").read_text())))
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print("strategy  workers    size  step s | stall s: foreground  background (max)  ratio | delay s")
    for each in rows:
        print(
            f"{each['strategy']:8}  {each['workers']:>7}  {each['bytes'] / 1e6:>3.0f} MB  "
            f"{each['step_s']:>6.2f} | {each['foreground_stall_s']:>19.3f}  "
            f"{each['background_stall_s']:>10.3f} ({each['background_stall_max_s']:.3f}) "
            f"{each['ratio']:>6.1%} | {each['foreground_delay_s']:.2f} / {each['background_delay_s']:.2f}"
        )


if __name__ == "__main__":
    main()
