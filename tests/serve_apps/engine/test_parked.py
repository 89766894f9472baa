"""A parked engine: without its cache, with its weights; woken, it answers as before, or does not answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_apps.engine.protocol import EngineConfig, EngineError, SamplingParams
from serve_apps.engine.torch_engine.model import load_model, read_facts
from serve_apps.engine.torch_engine.parked_weights import ParkedWeights, digest
from serve_apps.engine.torch_engine.runner import Runner, load_runner
from serve_apps.engine.torch_engine.torch_options import TorchOptions
from tests.serve_apps.engine.conftest import Asker, Reference, save_llama

CPU = torch.device("cpu")


def runner_of(directory: Path) -> Runner:
    config = EngineConfig(str(directory), device="cpu")
    return load_runner(config, read_facts(config, str(directory)), TorchOptions.of(config), CPU, None)


def parts_of(model: Any) -> list[torch.Tensor]:
    return [each for each in (*model.parameters(), *model.buffers()) if each.numel()]


def flip(tensor: torch.Tensor, draw: random.Random) -> Callable[[], None]:
    """Turn one bit round; what turns it back."""
    with torch.no_grad():
        octets = tensor.detach().view(-1).view(torch.uint8)
    at, bit = draw.randrange(octets.numel()), 1 << draw.randrange(8)

    def turn() -> None:
        with torch.no_grad():
            octets[at] ^= bit

    turn()
    return turn


@pytest.fixture(scope="module")
def runner(llama: Path) -> Runner:
    return runner_of(llama)


def test_a_parked_engine_answers_as_before_when_it_is_woken(
    start_engine: Callable[..., Asker], llama: Path, reference: Reference
) -> None:
    asker = start_engine(llama)
    before = asker.engine.statistics()
    for number in range(5):
        assert asker.run(asker.engine.park()) is True
        asker.run(asker.engine.wake())
        prompt = [7 + number, 8, 9] * 20  # one that the cache would have kept
        assert list(asker.greedy(prompt, 12).token_ids) == reference.generate(prompt, 12)
    assert asker.engine.statistics().cache_tokens == before.cache_tokens
    assert asker.engine.statistics().found_tokens == 0, "nothing of a cache that was given up is found"


def test_what_comes_while_it_is_parked_waits(
    start_engine: Callable[..., Asker], llama: Path, reference: Reference
) -> None:
    asker = start_engine(llama)

    async def go() -> Any:
        begun = asyncio.create_task(asker.answer([5, 6], SamplingParams(max_tokens=40, temperature=0.0)))
        await asker.until(lambda: asker.engine.statistics().running == 1)
        await asker.engine.park()
        assert begun.done(), "what has begun is finished first"
        late = asyncio.create_task(asker.answer([7, 8], SamplingParams(max_tokens=5, temperature=0.0)))
        await asyncio.sleep(0.1)
        assert not late.done()
        await asker.engine.wake()
        return await begun, await late

    begun, late = asker.run(go())
    assert list(begun.token_ids) == reference.generate([5, 6], 40)
    assert list(late.token_ids) == reference.generate([7, 8], 5)


def test_all_ranks_are_parked_and_woken(
    start_replica: Callable[..., Any], llama: Path, reference: Reference
) -> None:
    asker = start_replica(llama, extra={"step_timeout_s": 1.0, "heartbeat_s": 0.2}).asker
    for _ in range(3):
        asker.run(asker.engine.park())
        asker.run(asyncio.sleep(1.2))  # longer than a step may take
        asker.run(asker.engine.wake())
        assert list(asker.greedy([11, 12, 13], 10).token_ids) == reference.generate([11, 12, 13], 10)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_rank_that_dies_while_it_is_parked_is_noticed(
    noticed: bool, start_replica: Callable[..., Any], llama: Path
) -> None:
    replica = start_replica(llama, extra={"step_timeout_s": 2.0, "heartbeat_s": 0.2})
    replica.asker.run(replica.asker.engine.park())
    replica.follower.kill()
    if noticed:  # by its heartbeat, and before anybody has heard of that
        replica.follower.join()
        time.sleep(1.0)
    with pytest.raises(EngineError):
        replica.asker.run(replica.asker.engine.wake())

    async def until_it_is_known() -> None:
        while True:
            await asyncio.sleep(0.01)
            replica.asker.engine.check()

    with pytest.raises(EngineError):
        replica.asker.run(until_it_is_known())


def test_the_cache_is_given_up_and_had_again(runner: Runner) -> None:
    blocks, taken = runner.num_blocks, runner.cache_bytes
    assert taken > 0
    runner.park()
    assert runner.cache_bytes == 0
    runner.wake()
    assert (runner.num_blocks, runner.cache_bytes) == (blocks, taken)


def test_any_bit_that_differs_is_seen(runner: Runner) -> None:
    """A thousand times parked, and in half of them a bit turned round, in any of its tensors."""
    draw = random.Random(20261130)
    parts = parts_of(runner.model)
    refused = 0
    for number in range(1000):
        runner.park()
        turned = flip(draw.choice(parts), draw) if number % 2 else None
        if turned is None:
            runner.wake()
            continue
        with pytest.raises(EngineError, match="are not what they were"):
            runner.wake()
        refused += 1
        turned()
        runner.wake()  # the weights are, again
    assert refused == 500


def test_several_changes_do_not_outweigh_each_other(llama: Path) -> None:
    """Two tensors that have changed places, numbers moved by one, a part that is zero now."""
    model = load_model(EngineConfig(str(llama)), str(llama), CPU)
    own, parts = digest(model), parts_of(model)
    shapes = [part.shape for part in parts]
    same = [part for part in parts if part.dim() == 2 and shapes.count(part.shape) > 1][1:3]
    assert same[0].shape == same[1].shape
    for change, back in (
        (lambda: _swap(*same), lambda: _swap(*same)),
        (lambda: parts[1].data.copy_(parts[1].roll(1)), lambda: parts[1].data.copy_(parts[1].roll(-1))),
        (lambda: parts[2].data.neg_(), lambda: parts[2].data.neg_()),
    ):
        change()
        assert digest(model) != own
        back()
        assert digest(model) == own


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.data.clone()
    one.data.copy_(other.data)
    other.data.copy_(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_any_length_is_seen_to_its_last_bit(dtype: torch.dtype) -> None:
    draw = random.Random(1)
    for length in (1, 2, 3, 5, 7, 8, 9, 1023, 2**20 + 1):
        model = torch.nn.Module()
        model.register_buffer("part", torch.randn(length).to(dtype))
        own = digest(model)
        turned = flip(model.part.view(-1)[-1:], draw)
        assert digest(model) != own
        turned()
        assert digest(model) == own


def test_weights_stay_where_they_are_on_a_cpu(llama: Path) -> None:
    model = load_model(EngineConfig(str(llama)), str(llama), CPU)
    places = [part.data_ptr() for part in parts_of(model)]
    parked = ParkedWeights(model, CPU)
    assert parked.bring_back()
    assert [part.data_ptr() for part in parts_of(model)] == places


def test_other_weights_may_come_between(
    start_engine: Callable[..., Asker], llama: Path, tmp_path: Path
) -> None:
    other = save_llama(tmp_path / "other", seed=8, num_key_value_heads=4)
    asker = start_engine(llama)
    asker.run(asker.engine.load_weights(str(other)))
    asker.run(asker.engine.park())
    asker.run(asker.engine.wake())
    assert list(asker.greedy([3, 4, 5], 10).token_ids) == Reference(other).generate([3, 4, 5], 10)
