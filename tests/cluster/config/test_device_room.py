"""Models and the accelerators that the config names: what cannot fit is a mistake, what may fit is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config.models.model_memory import cache_bytes, count_parameters, weight_bytes
from cluster.config.models.model_sizes import read_sizes
from cluster.config.sections.model import ModelConfig
from cluster.files.safetensors import HeaderError, stored_tensors
from tests.cluster.config.config_files import load, mistakes, position

# 80 layers of a hidden size of 8192, like Llama 3 70B: 70.55e9 parameters.
JOB = (
    "train_jobs:\n  j: {publish: lm, batch: {global: 1, micro: 1}, workers: {min: 1, cpus: 1}, model: "
    "{hidden_size: 8192, intermediate_size: 28672, num_layers: 80, num_heads: 64, num_kv_heads: 8, "
    "vocab_size: 128256, max_position_embeddings: 8192}}\n"
)
NODES = "cluster: {{nodes: [{{name: a, cpus: 16}}, {{name: g, cpus: 16, gpus: 8, accelerator: {kind}}}]}}\n"


def text(app: str, kind: str = "H100-SXM") -> str:
    engine = "" if "engine:" in app else "engine: torch, "
    return NODES.format(kind=kind) + JOB + f"serve_apps:\n  a: {{model: lm, gpus: 1, {engine}{app}}}\n"


@pytest.mark.parametrize(
    ("app", "kind", "words"),
    [
        (
            "tensor: 1, precision: bf16",
            "H100-SXM",
            "the model of train_jobs.j needs 133.9 GiB at the least on its one rank (131.4 GiB of weights in "
            "bf16 and 2.5 GiB of KV cache), but H100-SXM has 80.0 GiB: take more ranks (tensor), a shorter",
        ),
        ("tensor: 2", "H100-SXM", "needs 133.9 GiB at the least on each of its 2 ranks"),
        ("tensor: 2", "H100-SXM", "take more ranks (tensor), precision: bf16, a shorter"),
        ("tensor: 4, precision: bf16, kv_cache: {memory_gib: 8}", "A100-40GB", "and 8.0 GiB of KV cache"),
        ("engine: vllm, tensor: 2, precision: bf16", "A100-40GB", "65.7 GiB of weights in bf16 and 0.0 GiB"),
    ],
)
def test_a_model_that_no_device_holds(
    app: str, kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (found,) = mistakes(tmp_path, text(app, kind))
    assert found.path == "serve_apps.a.tensor"
    assert words in found.message


def test_the_mistake_is_shown_where_the_ranks_are_given(tmp_path: Path) -> None:
    content = text("tensor: 2", "A100-40GB")
    (found,) = mistakes(tmp_path, content)
    assert (found.line, found.column) == position(content, "2}\n")


@pytest.mark.parametrize(
    ("app", "kind"),
    [
        ("tensor: 2, precision: bf16", "H100-SXM"),
        ("tensor: 1, precision: bf16", "H200-SXM"),
        ("tensor: 4", "H100-SXM"),
        # Whoever writes another name may mean something larger than all that is in the catalogue.
        ("tensor: 1", "H100"),
        ("tensor: 1", "null"),
        ("engine: vllm, tensor: 1, engine_kwargs: {quantization: fp8}", "H100-SXM"),
    ],
)
def test_a_model_that_may_fit(app: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    load(tmp_path, text(app, kind))


def test_a_shorter_context_and_another_node_can_make_it_fit(tmp_path: Path) -> None:
    content = text("tensor: 2, precision: bf16, kv_cache: {memory_gib: 15}")
    assert "15.0 GiB of KV cache" in mistakes(tmp_path, content)[0].message
    load(tmp_path, content, ["cluster.nodes.1.accelerator=H200-SXM"])
    load(tmp_path, content, ["serve_apps.a.kv_cache.memory_gib=10"])


def save_llama(directory: Path, tied: bool = False, **other: object) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory, **other)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_sizes_and_of_files_are_those_of_the_model(tied: bool, tmp_path: Path) -> None:
    count = sum(parameter.numel() for parameter in save_llama(tmp_path, tied).parameters())
    sizes = ModelConfig(
        hidden_size=64,
        intermediate_size=192,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=300,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    assert count_parameters(sizes) == count
    for precision, size in (("fp32", 4), ("bf16", 2)):
        assert weight_bytes(tmp_path, precision) == weight_bytes(sizes, precision) == count * size
    # Keys and values of 2 heads of 16 numbers in 3 layers.
    assert cache_bytes(read_sizes(tmp_path), 100, "bf16") == 100 * 3 * 2 * 2 * 16 * 2
    assert cache_bytes(read_sizes(tmp_path), None, "fp32") == 128 * 3 * 2 * 2 * 16 * 4


def test_the_parameters_of_sharded_files_are_counted_once(tmp_path: Path) -> None:
    model = save_llama(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    count = sum(parameter.numel() for parameter in model.parameters())
    # The same weights under other names, as some publish them beside the others.
    save_file({"all": torch.zeros(count)}, tmp_path / "consolidated.safetensors")
    assert weight_bytes(tmp_path, "fp32") == 4 * count


def test_a_tied_head_that_is_stored_again_is_not_counted(tmp_path: Path) -> None:
    count = sum(parameter.numel() for parameter in save_llama(tmp_path, tied=True).parameters())
    save_file(
        {"rest": torch.zeros(count), "lm_head.weight": torch.zeros(300, 64)}, tmp_path / "model.safetensors"
    )
    assert weight_bytes(tmp_path, "fp32") == 4 * count


def test_quantized_weights_take_what_they_take_in_the_file(tmp_path: Path) -> None:
    packed = torch.zeros(1000, dtype=torch.int32)
    save_file(
        {"packed": packed, "scale": torch.zeros(10, dtype=torch.float16)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    assert weight_bytes(tmp_path, "fp32") == 4000 + 40
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    assert weight_bytes(tmp_path, "fp32") == 4000 + 20


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 20, b"\2\0\0\0\0\0\0\0[]", b'\5\0\0\0\0\0\0\0{"a":']
)
def test_files_that_are_no_safetensors_say_so_and_weigh_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(HeaderError, match=r"model\.safetensors is no safetensors file"):
        stored_tensors(tmp_path)
    assert weight_bytes(tmp_path, "fp32") is None


def test_a_missing_shard_says_which(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HeaderError, match=r"model-1\.safetensors"):
        stored_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(HeaderError, match=r"index\.json cannot be read"):
        stored_tensors(tmp_path)
