"""A checkpoint of any strategy and number of ranks is one of any other."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, run_program, tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "hsdp"},
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
    "fsdp × tp 2": {"strategy": "fsdp", "tensor": 2},
}
SAVED_AT = 4
NEXT_STEPS = 2
# Each rank sums the same fp32 numbers in another order; see test_strategies.py.
TOLERANCE = 1e-6

Case = tuple[str, int]
"""A strategy and a number of ranks."""

CASES: list[Case] = [
    (name, size) for name in STRATEGIES for size in (1, 2, 4) if size % STRATEGIES[name].get("tensor", 1) == 0
]
SAVERS: list[Case] = [("ddp", 2), ("fsdp", 4), ("hsdp", 4), ("zero1", 2), ("zero3", 2), ("fsdp × tp 2", 4)]


def job(corpus: Path, name: str) -> TrainJobConfig:
    return tiny_job(
        corpus,
        steps=20,
        parallel=STRATEGIES[name],
        model={"tie_word_embeddings": True},
        optimizer={"learning_rate": 1e-3},
    )


def digests(assembly: Any) -> dict[str, str]:
    """A digest of every parameter, and of all that the optimizer keeps of each, whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.tensor import DTensor

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(assembly.parallel.stepped, assembly.state.optimizer, options=options)
    result = {}
    for key, value in {**model, **optimizer}.items():
        if not key.startswith("param_groups."):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            result[key] = hashlib.sha256(whole.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return result


def save(config_json: str, run: str, out: str) -> None:
    """Step, save, and say what was saved and how the run would have gone on."""
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    for _ in range(SAVED_AT):
        assembly.loop.step()
    assembly.saver.save()
    assembly.saver.finish()
    write(out, [{"digests": digests(assembly), "losses": losses(assembly)}])


def load(config_json: str, runs: list[str], out: str) -> None:
    """Load each run's checkpoint, and say what was loaded and how it goes on."""
    results = []
    for run in runs:
        assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
        assert assembly.begin() == SAVED_AT
        results.append({"digests": digests(assembly), "losses": losses(assembly)})
    write(out, results)


def losses(assembly: Any) -> list[float]:
    found: list[float] = []
    assembly.loop.reporter.metric = lambda line: found.append(line["loss"]) or False
    for _ in range(NEXT_STEPS):
        assembly.loop.step()
    return found


def write(out: str, results: list[dict[str, Any]]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


class Matrix:
    """The checkpoints of all savers, made when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.corpus = write_corpus(directory / "corpus.parquet")
        self.saved = cache(self._saved)

    def _saved(self, saver: Case) -> tuple[Path, dict[str, Any]]:
        name, size = saver
        config, run = job(self.corpus, name), self.directory / f"{SAVERS.index(saver)}"
        prepare_data(config, run / "data")
        out = self.directory / "saved.json"
        run_program(save, run, size, config.model_dump_json(), str(run), str(out))
        return run, json.loads(out.read_text())[0]

    def check(self, loader: Case, savers: list[Case]) -> None:
        """Load the checkpoints of all savers under one strategy."""
        name, size = loader
        sources = [self.saved(saver) for saver in savers]
        scratch = self.directory / "loading"
        copies = [scratch / run.name for run, _ in sources]
        for (run, _), copy in zip(sources, copies, strict=True):
            shutil.copytree(run, copy)
        out = scratch / "loaded.json"
        config = job(self.corpus, name).model_dump_json()
        run_program(load, scratch, size, config, [str(copy) for copy in copies], str(out))
        results = json.loads(out.read_text())
        shutil.rmtree(scratch)
        for saver, (_, saved), loaded in zip(savers, sources, results, strict=True):
            assert loaded["digests"] == saved["digests"], f"{saver} → {loader}"
            assert loaded["losses"] == pytest.approx(saved["losses"], abs=TOLERANCE), f"{saver} → {loader}"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def test_checkpoints_of_other_strategies_are_loaded(matrix: Matrix) -> None:
    matrix.check(("fsdp × tp 2", 2), SAVERS[:2])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("loader", CASES, ids=lambda case: f"{case[0]} ×{case[1]}")
def test_every_checkpoint_is_loaded_under_every_strategy(loader: Case, matrix: Matrix) -> None:
    matrix.check(loader, SAVERS)
