"""The torch engine on a GPU: it answers as `generate` on the CPU, in memory that holds what it promises."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_apps.engine.protocol import EngineConfig, SamplingParams
from serve_apps.engine.torch_engine.model import read_facts
from serve_apps.engine.torch_engine.runner import load_runner, load_together
from serve_apps.engine.torch_engine.torch_options import TorchOptions
from tests.gpu import on_a_gpu
from tests.serve_apps.engine.conftest import Asker, Reference, save_llama

pytestmark = on_a_gpu

MIB = 2**20
BIG: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""Of a model whose weights are large beside what else CUDA takes."""


def answers(asker: Asker, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer(prompt, params) for prompt in prompts))

    return [list(answer.token_ids) for answer in asker.run(ask())]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("big"), **BIG)


def test_a_prompt_read_in_pieces_beside_answers_is_read_right(
    start_engine: Callable[..., Asker], llama: Path
) -> None:
    asker = start_engine(llama, device="cuda", kv_cache_bytes=64 * MIB, prefill_ms=0.2)
    reference = Reference(llama)
    prompts = [[5, 6, 7], [(i * 7) % 300 + 5 for i in range(400)], [9]]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for prompt, answer in zip(prompts, answers(asker, prompts, params), strict=True):
        assert answer == reference.generate(prompt, 60, eos=False)


def test_the_room_that_was_measured_holds_everything_at_once(
    start_engine: Callable[..., Asker], big: Path
) -> None:
    """As many answers as may run, each as long as may be, after the cache took what it found free."""
    asker = start_engine(big, device="cuda", precision="bf16", max_batch=64, batched_tokens=4096)
    free, total = torch.cuda.mem_get_info()
    assert free < 0.2 * total, "the cache has what the GPU had free"
    long = [[(i * k) % 300 + 5 for i in range(480)] for k in range(1, 65)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=5, top_p=0.9, seed=1)
    assert [len(answer) for answer in answers(asker, long, params)] == [30] * 64
    asker.engine.check()


def test_no_second_copy_is_loaded_beside_the_model(big: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path, seed=8, **BIG)
    config = EngineConfig(str(big), device="cuda", precision="bf16", kv_cache_bytes=64 * MIB)
    device = torch.device("cuda", 0)
    runner = load_runner(config, read_facts(config, str(big)), TorchOptions.of(config), device, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    load_together(runner, str(other), None)
    torch.cuda.synchronize()
    largest = max(parameter.nbytes for parameter in runner.model.parameters())
    # A tensor of the file, which is of fp32, and what it is turned into.
    assert torch.cuda.max_memory_allocated() - before <= 4 * largest
    assert torch.cuda.memory_allocated() - before < MIB
    assert sum(parameter.nbytes for parameter in runner.model.parameters()) > 10 * largest


def test_an_engine_without_a_gpu_sees_none_whatever_ray_shows() -> None:
    source = (
        "from serve_apps.engine.devices import hide_what_is_not_leased as hide\n"
        "from serve_apps.engine.protocol import EngineConfig\n"
        "hide(EngineConfig('m', device='cpu'))\n"
        "import torch; print(torch.cuda.is_available())"
    )
    told = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert told.stdout.strip() == "False", told.stderr
