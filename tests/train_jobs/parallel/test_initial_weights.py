"""Sharded models begin with the weights of one process, and no rank but the first ever builds them whole."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, run_program, tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data
from train_jobs.data.token_streams import TokenStreams
from train_jobs.spec import DATA

# 301 and 90 divide by neither 2 nor 4: shards are unequal, on both axes.
UNEVEN = {"vocab_size": 301, "intermediate_size": 90, "tie_word_embeddings": True}
PARALLEL: dict[str, tuple[dict[str, Any], int]] = {
    "fsdp": ({"strategy": "fsdp", "activation_checkpointing": "full"}, 4),
    "hsdp": ({"strategy": "hsdp"}, 4),
    "fsdp × tp": ({"strategy": "fsdp", "tensor": 2}, 4),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


def compare(config_json: str, run: str) -> None:
    """This rank's part in the model's initial state is what one process builds."""
    refused = AssertionError("only the first rank reads weights")
    others = mock.patch("transformers.AutoModelForCausalLM.from_pretrained", side_effect=refused)
    with others if dist.get_rank() else nullcontext():
        assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    whole = assembly.task.build()
    model = assembly.parallel.stepped
    buffers = dict(model.named_buffers())
    assert {name: value.tolist() for name, value in buffers.items()} == {
        name: value.tolist() for name, value in whole.named_buffers()
    }
    tied = model.get_submodule("lm_head").weight is model.get_submodule("model.embed_tokens").weight
    assert tied == whole.config.tie_word_embeddings
    weights = assembly.state.full_model()
    if dist.get_rank() == 0:
        expected = whole.state_dict()
        assert weights.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []
    dist.barrier()


@pytest.mark.parametrize("name", PARALLEL)
def test_a_sharded_model_begins_as_one_process_builds_it(name: str, corpus: Path, tmp_path: Path) -> None:
    parallel, world_size = PARALLEL[name]
    config = tiny_job(corpus, model=UNEVEN, parallel=parallel)
    prepare_data(config, tmp_path / DATA)
    run_program(compare, tmp_path, world_size, config.model_dump_json(), str(tmp_path))


def test_a_directory_is_read_by_one_rank_and_buffers_outside_the_state_come_too(
    corpus: Path, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    architecture = LlamaConfig(
        hidden_size=32,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=301,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    LlamaForCausalLM(architecture).save_pretrained(tmp_path / "model")
    prepare_data(tiny_job(corpus), tmp_path / "tokenizer")
    config = tiny_job(
        corpus,
        model={"directory": str(tmp_path / "model")},
        data={"tokenizer": str(TokenStreams(tmp_path / "tokenizer").tokenizer_directory)},
        parallel={"strategy": "fsdp"},
    )
    prepare_data(config, tmp_path / DATA)
    run_program(compare, tmp_path, 2, config.model_dump_json(), str(tmp_path))


def measure(config_json: str, run: str) -> None:
    """Write by how much this rank's memory grew at most while everything was put together."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    before = _status("VmRSS")
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    grown = _status("VmHWM") - before
    size = sum(parameter.numel() * 4 for parameter in assembly.parallel.stepped.parameters())
    Path(run, f"grown-{dist.get_rank()}.json").write_text(json.dumps([grown, size]))
    dist.barrier()


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def test_only_the_first_rank_holds_the_whole_model(corpus: Path, tmp_path: Path) -> None:
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 16}
    config = tiny_job(corpus, model=large, parallel={"strategy": "fsdp"})
    prepare_data(config, tmp_path / DATA)
    run_program(measure, tmp_path, 2, config.model_dump_json(), str(tmp_path))
    (first, size), (other, _) = (json.loads((tmp_path / f"grown-{rank}.json").read_text()) for rank in (0, 1))
    assert size > 200e6
    assert first > 1.4 * size, "it holds the whole model beside its half, or this measures nothing"
    assert other < 0.85 * size, "half of the model is its share"
