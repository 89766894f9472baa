"""What is written of a trained model: its precision, how it generates, and tied weights once."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from tests.train_jobs.ranks import assemble, finish, start_program, tiny_job, write_corpus
from tests.train_jobs.tasks.test_custom_task import EXAMPLE
from tests.train_jobs.tasks.test_custom_task import job as example_job
from train_jobs.checkpoint.export import export_checkpoint
from train_jobs.data.token_streams import TokenStreams
from train_jobs.data.tokens import prepare_tokens
from train_jobs.tasks import make_task
from train_jobs.tasks.weights import cast, once, tied_names

GENERATION = {"eos_token_id": [0, 7], "temperature": 0.6, "top_p": 0.9, "pad_token_id": 0}
"""As the Hub has them: a temperature without do_sample, which transformers itself would not write."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_ties_are_found_kept_and_written_once() -> None:
    model = Tied()
    assert tied_names(model) == {"head.weight": "embedding.weight"}
    weights = dict(model.state_dict())
    weights["head.weight"] = weights["embedding.weight"]
    half = cast(weights, torch.bfloat16)
    assert half["head.weight"] is half["embedding.weight"]
    assert half["embedding.weight"].dtype == torch.bfloat16
    assert half["norm.num_batches_tracked"].dtype == torch.int64
    kept, dropped = once(half)
    assert dropped == {"head.weight": "embedding.weight"}
    assert kept.keys() == half.keys() - {"head.weight"}
    assert once({"a": torch.zeros(0), "b": torch.zeros(0)})[1] == {}, "nothing is no tie"


def write_model(directory: Path, tokenizer: Path, dtype: torch.dtype, tied: bool) -> Path:
    """A small model as people have them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    return directory


@pytest.mark.parametrize(
    ("source", "wanted", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (None, None, torch.float32),
        (None, "bf16", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_exported_as_it_came(
    tmp_path: Path, source: torch.dtype | None, wanted: str | None, expected: torch.dtype, tied: bool
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    corpus = write_corpus(tmp_path / "corpus.parquet")
    model: dict[str, Any] = {"tie_word_embeddings": tied}
    if source is not None:
        prepare_tokens(tiny_job(corpus), tmp_path / "first")
        tokenizer = TokenStreams(tmp_path / "first").tokenizer_directory
        model = {"directory": str(write_model(tmp_path / "source", tokenizer, source, tied))}
    config = tiny_job(corpus, model=model, export={"precision": wanted})
    prepare_tokens(config, tmp_path / "data")
    task = make_task(config, tmp_path / "data")
    weights = {name: value.clone() for name, value in task.build().state_dict().items()}
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    before = dict(weights)
    task.export(weights, tmp_path / "export")
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {expected}
    assert ("lm_head.weight" in written) is not tied
    document = json.loads((tmp_path / "export" / "config.json").read_text())
    assert document["dtype"] == str(expected).removeprefix("torch.")
    assert document.get("use_cache", True) is True
    generation = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    if source is not None:
        assert generation == GENERATION
    assert generation.get("use_cache", True) is True
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, before[name].to(expected)), name


def write_tokenizer(directory: Path, corpus: Path, **named: str) -> Path:
    """A tokenizer of the user's, whose special tokens come after all others."""
    from transformers import AutoTokenizer

    prepare_tokens(tiny_job(corpus), directory / "trained")
    tokenizer = AutoTokenizer.from_pretrained(TokenStreams(directory / "trained").tokenizer_directory)
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens(sorted(set(named.values())))
    type(tokenizer)(tokenizer_object=backend, **named).save_pretrained(directory / "own")
    return directory / "own"


@pytest.mark.parametrize(
    "named",
    [
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        {"eos_token": "</s>", "pad_token": "</s>"},
        {},
    ],
)
def test_a_new_model_ends_texts_as_the_tokenizer_of_its_data_does(
    tmp_path: Path, named: dict[str, str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    corpus = write_corpus(tmp_path / "corpus.parquet")
    own = write_tokenizer(tmp_path, corpus, **named)
    config = tiny_job(corpus, model={"vocab_size": 310}, data={"tokenizer": str(own)})
    prepare_tokens(config, tmp_path / "data")
    task = make_task(config, tmp_path / "data")
    task.export(dict(task.build().state_dict()), tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(own)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    assert all(ids.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for document in (model.config, model.generation_config):
        assert document.bos_token_id == ids.get("bos_token")
        assert document.eos_token_id == ids.get("eos_token")
    assert model.generation_config.pad_token_id == ids.get("pad_token")
    assert model.get_input_embeddings().padding_idx is None
    ends = TokenStreams(tmp_path / "data").train.tokens[-1]
    assert not named or ends == model.generation_config.eos_token_id


TIED = EXAMPLE.replace(
    "        self.head = nn.Linear(width, 128)\n",
    "        self.head = nn.Linear(width, 128)\n        self.head.weight = self.embedding.weight\n",
)
COUNTED = TIED.replace("Sums(loss, targets.numel()", "Sums(loss / targets.shape[1], len(targets)")
"""Counts samples, as DeepSpeed takes it."""


def whole(directory: str, config_json: str, run: str) -> None:
    """Train and export; rank 0 then does what `shoal export` does with the last checkpoint."""
    sys.path.insert(0, directory)
    config = TrainJobConfig.model_validate_json(config_json)
    assembly = assemble(config, Path(run))
    assembly.begin()
    assert assembly.loop.run() == "finished"
    assembly.export()
    if dist.get_rank() == 0:
        assert export_checkpoint(Storage(run), config, None, Path(run, "again")) == config.steps


DEEPSPEED = {"engine": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 3}}}
ENGINE = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is an extra")


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({"strategy": "ddp"}, 1),
        ({"strategy": "ddp"}, 2),
        ({"strategy": "fsdp"}, 2),
        ({"strategy": "zero1"}, 2),
        pytest.param({"strategy": "data_parallel"}, 1, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero2"}, 2, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero3"}, 2, marks=pytest.mark.slow),
        pytest.param({"strategy": "hsdp"}, 4, marks=pytest.mark.slow),
        pytest.param(DEEPSPEED, 2, marks=[pytest.mark.slow, ENGINE]),
    ],
    ids=lambda value: value.get("strategy", "deepspeed") if isinstance(value, dict) else str(value),
)
def test_a_custom_model_with_tied_weights_is_exported_under_every_strategy(
    tmp_path: Path, parallel: dict[str, Any], ranks: int
) -> None:
    from safetensors import safe_open

    assert len({EXAMPLE, TIED, COUNTED}) == 3
    (tmp_path / "my_task.py").write_text(COUNTED if parallel is DEEPSPEED else TIED)
    config = example_job(
        steps=3, parallel=parallel, checkpoint={"every_steps": 100}, evaluate={"every_steps": None}
    )
    arguments = (str(tmp_path), config.model_dump_json(), str(tmp_path / "run"))
    finish(start_program(whole, tmp_path / "run", ranks, *arguments))
    written = []
    for name in ("export", "again"):
        with safe_open(tmp_path / "run" / name / "model.safetensors", "pt") as file:
            written.append({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118  (it is no dict)
            metadata = file.metadata()
        assert "embedding.weight" in written[-1]
        assert "head.weight" not in written[-1], name
        assert metadata["head.weight"] == "embedding.weight", name
    first, again = written
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
