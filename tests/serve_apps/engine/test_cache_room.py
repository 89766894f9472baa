"""The KV cache of a GPU has what the largest step leaves; CUDA's memory is played on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_apps.engine.protocol import EngineConfig, EngineError
from serve_apps.engine.torch_engine import runner as runner_module
from serve_apps.engine.torch_engine.cache_room import GPU_SHARE, gpu_room
from serve_apps.engine.torch_engine.model import read_facts
from serve_apps.engine.torch_engine.runner import Runner
from serve_apps.engine.torch_engine.step import Step
from serve_apps.engine.torch_engine.torch_options import TorchOptions

GIB = 2**30
CUDA = torch.device("cuda", 0)


class Gpu:
    """A GPU's memory under PyTorch's allocator: what is freed stays reserved until the cache is emptied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, weights: int) -> None:
        self.total, self.allocated, self.reserved, self.peak = total, weights, weights, weights
        self.libraries = 0
        """What libraries took past the allocator."""
        self.running = False
        for name in ("memory_allocated", "max_memory_allocated", "mem_get_info"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def take(self, size: int) -> None:
        """For a moment, while the device runs on by itself."""
        self.running = True
        self.peak = max(self.peak, self.allocated + size)
        self.reserved = max(self.reserved, self.allocated + size)

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        assert not self.running, "the step has not ended yet"
        return self.peak

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == CUDA
        return self.total - self.reserved - self.libraries, self.total

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset(self, device: torch.device) -> None:
        self.peak = self.allocated

    def synchronize(self, device: torch.device) -> None:
        self.running = False


@pytest.mark.parametrize("loading_peak", [0, 30 * GIB])
def test_what_a_step_takes_and_what_libraries_keep_is_left_free(
    loading_peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, total=80 * GIB, weights=20 * GIB)
    gpu.take(loading_peak)

    def step() -> None:
        gpu.take(6 * GIB)
        gpu.libraries = 2 * GIB

    room = gpu_room(CUDA, step)
    assert room == int((80 - 20 - 2) * GIB * GPU_SHARE) - 6 * GIB
    # With the cache in its place there is room for the step itself.
    assert gpu.mem_get_info(CUDA)[0] - room >= 6 * GIB


def test_a_step_that_takes_all_there_is_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, total=10 * GIB, weights=5 * GIB)
    assert gpu_room(CUDA, lambda: gpu.take(5 * GIB)) == 0


def loaded(llama: Path, **options: Any) -> Runner:
    config = EngineConfig(str(llama), **options)
    return Runner(config, read_facts(config, str(llama)), TorchOptions.of(config), torch.device("cpu"))


@pytest.mark.parametrize(("batched_tokens", "new"), [(40, 33), (4, 1), (5000, 500)])
def test_the_largest_step_has_all_answers_beside_the_end_of_the_longest_prompt(
    batched_tokens: int, new: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = loaded(llama, max_batch=8, context_length=500, batched_tokens=batched_tokens, block_size=16)
    runner.room()
    seen: list[tuple[Step, tuple[int, ...]]] = []
    run = Runner.run

    def noted(self: Runner, step: Step) -> Any:
        outputs = run(self, step)
        seen.append((step, tuple(outputs.logits.shape)))
        return outputs

    monkeypatch.setattr(Runner, "run", noted)
    runner.run_largest()
    ((step, logits),) = seen
    assert [len(row.tokens) for row in step.rows] == [1] * 7 + [new]
    assert step.rows[-1].start + new == 500
    assert logits[0] == 8, "each of them wants a token"
    # Nothing of it is left: neither its cache, nor where its tokens lay.
    assert runner.num_blocks == runner.cache_bytes == 0
    assert not any(runner._tables)


def test_the_cache_of_a_gpu_is_measured_after_that_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded(llama, max_batch=8, context_length=512)
    found: list[Callable[[], None]] = []

    def room(device: torch.device, largest_step: Callable[[], None]) -> int:
        found.append(largest_step)
        return 100_000

    monkeypatch.setattr(runner_module, "gpu_room", room)
    # Only the device's kind is played: what is computed is computed here.
    forward = Runner._forward

    def on_cpu(self: Runner, *arguments: Any) -> torch.Tensor:
        self.device = torch.device("cpu")
        try:
            return forward(self, *arguments)
        finally:
            self.device = CUDA

    monkeypatch.setattr(Runner, "_forward", on_cpu)
    # 512 bytes a token, as in test_weights, in blocks of 32.
    with pytest.raises(EngineError, match="room for 192 tokens"):
        runner.room()
    assert found == [runner.run_largest]


def test_a_step_out_of_memory_says_so(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(Runner, "room", full)
    config = EngineConfig(str(llama))
    with pytest.raises(EngineError, match="does not fit in memory: CUDA out of memory"):
        runner_module.load_runner(
            config, read_facts(config, str(llama)), TorchOptions.of(config), torch.device("cpu"), None
        )
