"""bf16 and fp16: losses near those of fp32, fp32 state, and steps left out where fp16 overflows."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, run_program, run_ranks, tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data

# bf16 keeps 8 bits of a mantissa, fp16 11: each product is off by up to 2^-9 or 2^-12 of itself, and sums of
# many products by less. A loss near 6 is held to half a percent, and to a tenth of that.
TOLERANCES = {"bf16": 0.03, "fp16": 0.003}
PARALLEL: dict[str, tuple[dict[str, Any], int]] = {
    "ddp": ({"strategy": "ddp"}, 2),
    "zero1": ({"strategy": "zero1"}, 2),
    "fsdp": ({"strategy": "fsdp"}, 2),
    "zero2": ({"strategy": "zero2"}, 2),
    "fsdp-reduced-low": ({"strategy": "fsdp", "fsdp": {"reduce_dtype": "bf16", "output_dtype": "fp32"}}, 2),
    "fsdp-tp": ({"strategy": "fsdp", "tensor": 2}, 4),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def fp32(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return [line["loss"] for line in run_ranks(tiny_job(corpus), tmp_path_factory.mktemp("fp32"), 1)]


QUICK = {("ddp", "fp16"), ("fsdp", "bf16")}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in product(PARALLEL, TOLERANCES)
    ],
)
def test_losses_are_near_those_of_fp32(
    name: str, precision: str, corpus: Path, fp32: list[float], tmp_path: Path
) -> None:
    parallel, world_size = PARALLEL[name]
    metrics = run_ranks(tiny_job(corpus, parallel=parallel, precision=precision), tmp_path, world_size)
    losses = [line["loss"] for line in metrics]
    assert losses == pytest.approx(fp32, abs=TOLERANCES[precision])
    assert losses != fp32, "it was computed in fp32"
    assert [line.get("skipped") for line in metrics] == [False if precision == "fp16" else None] * 8


def overflow(config_json: str, run: str) -> None:
    """Begin with a loss scale that no fp16 gradient survives; rank 0 writes what each step left."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    assembly.state.loss_scale.value = 2.0**28
    found: list[dict[str, Any]] = []

    def metric(line: dict[str, Any]) -> bool:
        whole = [
            value.full_tensor() if isinstance(value, DTensor) else value
            for value in assembly.parallel.stepped.state_dict().values()
        ]
        assert all(value.dtype == torch.float32 for value in whole)
        found.append({**line, "sum": sum(value.double().abs().sum().item() for value in whole)})
        return False

    assembly.loop.reporter.metric = metric  # type: ignore[method-assign]
    for _ in range(24):
        assembly.loop.step()
    if dist.get_rank() == 0:
        (Path(run) / "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ddp", "fsdp-tp"))]
)
def test_a_step_whose_gradients_overflow_is_left_out_and_the_scale_halved(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    parallel, world_size = PARALLEL[name]
    config = tiny_job(corpus, parallel=parallel, precision="fp16", steps=40)
    prepare_data(config, tmp_path / "data")
    run_program(overflow, tmp_path, world_size, config.model_dump_json(), str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    skipped = [line["skipped"] for line in found]
    num_skipped = sum(skipped)
    assert 0 < num_skipped < len(found)
    scale = 2.0**28
    for before, line in zip([None, *found], found, strict=False):
        assert line["loss_scale"] == scale
        if line["skipped"]:
            assert line["grad_norm"] is None
            assert before is None or line["sum"] == before["sum"], (
                "a step that was left out changed the model"
            )
            scale /= 2
        elif before is not None:
            assert line["sum"] != before["sum"]
    good = [line["loss"] for line in found if not line["skipped"]]
    assert good[-1] < good[0]
