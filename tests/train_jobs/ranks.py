"""Runs a job's ranks as plain processes of this machine: torch.distributed, no Ray."""

from __future__ import annotations

import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.sections.train import TrainJobConfig
from train_jobs.spec import DATA

if TYPE_CHECKING:
    from train_jobs.rank.assembly import RankAssembly

Program = Callable[..., None]

TINY: dict[str, Any] = {
    "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300},
    "data": {"sequence_length": 16, "held_out_every": 4},
    "batch": {"global": 8, "micro": 2},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
    "steps": 8,
    "evaluate": {"every_steps": 4},
    "checkpoint": {"every_steps": 4},
}
"""A job that a test can run in a second."""


PRELOADED = ("train_jobs.rank.assembly", "transformers.models.llama.modeling_llama", "safetensors.torch")
_GROUPS = itertools.count()
WORDS = "shoal fish swim in one school and turn as one when a wave comes over the reef"


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(base.get(key, {}), value) if isinstance(value, dict) else value
    return result


def tiny_job(corpus: Path, **changes: Any) -> TrainJobConfig:
    return TrainJobConfig.model_validate(merged(merged(TINY, {"data": {"source": str(corpus)}}), changes))


def write_corpus(path: Path, documents: int = 24) -> Path:
    """A small Parquet file of sentences made from a rule."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = tuple(WORDS.split(" "))
    texts = [
        " ".join(words[(index * 7 + place * (index + 3)) % len(words)] for place in range(120))
        for index in range(documents)
    ]
    pq.write_table(pa.table({"text": texts}), path)
    return path


# A rank's imports take seconds, and a test starts many ranks: they are forked from one process that has
# imported everything and run nothing.
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tests.train_jobs.ranks", *PRELOADED])


class RankProcess:
    """One rank, started; it runs a function of a module of the tests within its process group."""

    def __init__(self, environment: dict[str, str], log: Path, program: Program, *arguments: Any) -> None:
        self.log = log
        self._process = _FORKING.Process(target=_in_group, args=(environment, str(log), program, arguments))
        self._process.start()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None, "it was started"
        os.kill(self._process.pid, number)

    def wait(self, timeout_s: float = 240.0) -> None:
        self._process.join(timeout_s)
        assert self.exit_code is not None, f"it did not end within {timeout_s:.0f} s:\n{self._stacks()}"

    def _stacks(self) -> str:
        """Its log, with where each of its threads is at the end."""
        assert self._process.pid is not None, "it was started"
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(1)
        return self.log.read_text()


def start_program(program: Program, directory: Path, world_size: int, *arguments: Any) -> list[RankProcess]:
    """Start a function on every rank of a new group; logs go into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    # No port, which another process could take first, or a rank that calls there too early be its own answer.
    environment = {"STORE": str(directory / f"store-{next(_GROUPS)}"), "WORLD_SIZE": str(world_size)}
    return [
        RankProcess({**environment, "RANK": str(rank)}, directory / f"rank-{rank}.log", program, *arguments)
        for rank in range(world_size)
    ]


def finish(processes: list[RankProcess]) -> None:
    """Wait for all ranks; each has to have ended well."""
    for process in processes:
        process.wait()
    for process in processes:
        assert process.exit_code == 0, process.log.read_text()


def run_program(program: Program, directory: Path, world_size: int, *arguments: Any) -> None:
    """Run a function on every rank of a new group, to its end."""
    finish(start_program(program, directory, world_size, *arguments))


def start_ranks(config: TrainJobConfig, run: Path, world_size: int, attempt: int = 1) -> list[RankProcess]:
    """Start all ranks of a run; what rank 0 reports goes to `reports.jsonl` in the run's directory."""
    from train_jobs.data.preparation import prepare_data

    prepare_data(config, run / DATA)
    return start_program(train, run, world_size, config.model_dump_json(), str(run), attempt)


def run_ranks(config: TrainJobConfig, run: Path, world_size: int, attempt: int = 1) -> list[dict[str, Any]]:
    """Run all ranks to the end; returns rank 0's metric lines."""
    finish(start_ranks(config, run, world_size, attempt))
    return [
        line
        for line in reports(run)
        if "loss" in line and line.get("attempt") == attempt and "kind" not in line
    ]


def reports(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "reports.jsonl").read_text().splitlines()]


def held_out_loss(directory: Path, held_out: Any, length: int) -> tuple[float, int]:
    """Loss over a token stream, every token but the first once; transformers loads the model by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.from_numpy(held_out.astype("int64"))
    model = AutoModelForCausalLM.from_pretrained(directory)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, length):
            window = tokens[start : start + length + 1]
            logits = model(input_ids=window[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(tokens) - 1), len(tokens) - 1


def loss_of_export(config: TrainJobConfig, run: Path) -> tuple[float, int]:
    """Loss of a run's exported model on its held-out text, and the number of tokens; from the text alone."""
    import numpy as np
    from transformers import AutoTokenizer

    from train_jobs.data.documents import read_documents

    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    texts = [document.text for document in read_documents(config.data) if document.held_out]
    text = "".join(f"{text}{tokenizer.eos_token}" for text in texts)
    stream = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
    return held_out_loss(run / "export", stream, config.data.sequence_length)


def some_steps(directory: str, config_json: str, run: str, until: int, attempt: int) -> None:
    """Train up to a step, save, and be gone; the task's module lies in the directory."""
    sys.path.insert(0, directory)
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run), attempt)
    assembly.begin()
    while assembly.state.step < until:
        assembly.loop.step()
    assembly.saver.save()
    assembly.saver.finish()


class FileReporter:
    def __init__(self, run: Path) -> None:
        self.path = run / "reports.jsonl"

    def metric(self, line: dict[str, Any]) -> bool:
        self._write(line)
        return False

    def event(self, kind: str, **facts: Any) -> None:
        self._write({"kind": kind, **facts})

    def _write(self, line: dict[str, Any]) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def assemble(config: TrainJobConfig, run: Path, attempt: int = 1, ranks_per_node: int = 2) -> RankAssembly:
    """What a rank steps with, on this rank of a group."""
    import torch
    import torch.distributed as dist

    from cluster.files.storage import Storage
    from train_jobs.rank.assembly import RankAssembly
    from train_jobs.records.workspace import Workspace

    nodes = [f"node-{rank // ranks_per_node}" for rank in range(dist.get_world_size())]
    return RankAssembly(
        config, Workspace(Storage(run)), attempt, nodes, FileReporter(run), torch.device("cpu")
    )


def train(config_json: str, run: str, attempt: int) -> None:
    """A rank of a job, from restoring to export."""
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run), attempt)
    assembly.begin()
    if assembly.loop.run() == "finished":
        assembly.export()


def _in_group(environment: dict[str, str], log: str, program: Program, arguments: tuple[Any, ...]) -> None:
    """What a rank's process does; its output goes into the log."""
    import torch
    import torch.distributed as dist

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()  # says where a rank was that crashes
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = dist.FileStore(environment["STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    program(*arguments)
    dist.destroy_process_group()
