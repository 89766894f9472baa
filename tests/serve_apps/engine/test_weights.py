"""Other weights while requests run, the memory of the KV cache, and what is refused at the start."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from serve_apps.engine.protocol import EngineError, SamplingParams, WeightsError
from tests.serve_apps.engine.conftest import Asker, Reference, save_llama

PROMPT = list(range(20, 60))


def greedy(max_tokens: int, **other: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **other)


@pytest.fixture(scope="module")
def other_llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    directory = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(llama, directory)
    model = AutoModelForCausalLM.from_pretrained(llama)
    torch.manual_seed(99)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def other_reference(other_llama: Path) -> Reference:
    return Reference(other_llama)


def change_weights(asker: Asker, other: Path, old: Reference, new: Reference) -> None:
    """Answers that have begun are the old model's to their end, all others wholly the new one's."""

    async def schedule() -> tuple[list[Any], list[Any]]:
        # One more than may run at once, so that one has not begun when the weights change.
        begun = [asyncio.ensure_future(asker.answer(PROMPT, greedy(60))) for _ in range(2)]
        await asker.until(lambda: asker.engine.statistics().generated_tokens > 10)
        waiting = asyncio.ensure_future(asker.answer(PROMPT, greedy(20)))
        await asker.until(lambda: asker.engine.statistics().waiting == 1)
        changing = asyncio.ensure_future(asker.engine.load_weights(str(other)))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(asker.answer(PROMPT, greedy(20)))
        await changing
        return await asyncio.gather(*begun), await asyncio.gather(waiting, late)

    before, after = asker.run(schedule())
    for answer in before:
        assert list(answer.token_ids) == old.generate(PROMPT, 60)
    for answer in after:
        assert list(answer.token_ids) == new.generate(PROMPT, 20)
    assert old.generate(PROMPT, 20) != new.generate(PROMPT, 20)


def test_other_weights_come_between_two_answers(
    start_engine: Callable[..., Any], llama: Path, other_llama: Path, reference: Any, other_reference: Any
) -> None:
    asker = start_engine(llama, max_batch=2, block_size=8)
    change_weights(asker, other_llama, reference, other_reference)
    change_weights(asker, llama, other_reference, reference)


def test_all_ranks_change_their_weights(
    start_replica: Callable[..., Any], llama: Path, other_llama: Path, reference: Any, other_reference: Any
) -> None:
    asker = start_replica(llama, max_batch=2, block_size=8).asker
    change_weights(asker, other_llama, reference, other_reference)


def test_a_change_that_nobody_waits_for_any_more_leaves_the_engine_whole(
    start_engine: Callable[..., Any], llama: Path, other_llama: Path, reference: Reference
) -> None:
    asker = start_engine(llama, max_batch=2)

    async def leave() -> Any:
        begun = asyncio.ensure_future(asker.answer(PROMPT, greedy(60)))
        await asker.until(lambda: asker.engine.statistics().generated_tokens > 3)
        changing = asyncio.ensure_future(asker.engine.load_weights(str(other_llama)))
        await asyncio.sleep(0)
        changing.cancel()
        await asyncio.wait([changing])
        return await begun

    assert list(asker.run(leave()).token_ids) == reference.generate(PROMPT, 60)
    assert list(asker.greedy(PROMPT, 10).token_ids) == reference.generate(PROMPT, 10)
    asker.engine.check()


def test_a_change_ends_with_an_error_where_a_rank_is_lost(
    start_replica: Callable[..., Any], llama: Path, other_llama: Path
) -> None:
    replica = start_replica(llama, extra={"step_timeout_s": 3.0, "heartbeat_s": 60.0})
    replica.follower.kill()
    replica.follower.join()
    with pytest.raises(EngineError):
        replica.asker.run(replica.asker.engine.load_weights(str(other_llama)))

    def broken() -> bool:
        try:
            replica.asker.engine.check()
        except EngineError:
            return True
        return False

    replica.asker.run(replica.asker.until(broken))


def broken_copies(llama: Path, directory: Path) -> dict[str, Path]:
    """Models that cannot take over, by what is wrong with them."""
    copies = {name: directory / name for name in ("no weights", "cut", "lacks one", "no tokenizer")}
    for copy in copies.values():
        shutil.copytree(llama, copy)
    (copies["no weights"] / "model.safetensors").unlink()
    whole = (copies["cut"] / "model.safetensors").read_bytes()
    (copies["cut"] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    weights = load_file(copies["lacks one"] / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, copies["lacks one"] / "model.safetensors", metadata={"format": "pt"})
    for file in copies["no tokenizer"].glob("tokenizer*"):
        file.unlink()
    copies["wider"] = directory / "wider"
    copies["wider"].mkdir()
    save_llama(copies["wider"], num_key_value_heads=4, hidden_size=64)
    copies["odd heads"] = directory / "odd"
    copies["odd heads"].mkdir()
    save_llama(copies["odd heads"], num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    copies["shorter"] = directory / "shorter"
    shutil.copytree(llama, copies["shorter"])
    config = copies["shorter"] / "config.json"
    said = '"max_position_embeddings": 512'
    assert said in config.read_text()
    config.write_text(config.read_text().replace(said, said.replace("512", "256")))
    copies["nowhere"] = directory / "nowhere"
    return copies


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_cannot_be_loaded_change_nothing(
    ranks: int, request: pytest.FixtureRequest, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    if ranks == 1:
        asker = request.getfixturevalue("start_engine")(llama, context_length=512)
    else:
        asker = request.getfixturevalue("start_replica")(llama, context_length=512).asker
    expected = reference.generate(PROMPT, 10)
    for what, directory in broken_copies(llama, tmp_path).items():
        with pytest.raises(WeightsError, match=str(directory)):
            asker.run(asker.engine.load_weights(str(directory)))
        assert list(asker.greedy(PROMPT, 10).token_ids) == expected, what
    asker.engine.check()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no weights", "the weights of .* cannot be read: Error no file named model.safetensors"),
        ("cut", "the weights of .* cannot be read: .*deserializing header"),
        ("lacks one", "lack weights of the model: model.norm.weight"),
        ("no tokenizer", "has no tokenizer"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(
    what: str, said: str, start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=said):
        start_engine(broken_copies(llama, tmp_path)[what])


def test_the_cache_takes_the_memory_it_was_given_and_no_more(
    start_engine: Callable[..., Any], llama: Path, reference: Reference
) -> None:
    # Two layers of four heads with keys and values of eight numbers in fp32: 512 bytes a token.
    given = 100_000
    asker = start_engine(llama, context_length=128, kv_cache_bytes=given, block_size=16, max_batch=8)
    block_bytes = 512 * 16
    assert asker.engine.statistics().cache_bytes == given // block_bytes * block_bytes
    assert asker.engine.statistics().cache_tokens == given // block_bytes * 16

    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer([5 + n], greedy(120, ignore_eos=True)) for n in range(8)))

    for number, answer in enumerate(asker.run(ask())):
        assert list(answer.token_ids) == reference.generate([5 + number], 120, eos=False)
    statistics = asker.engine.statistics()
    assert statistics.preempted > 0
    assert statistics.cache_bytes <= given


def test_a_cache_too_small_for_one_request_is_refused(start_engine: Callable[..., Any], llama: Path) -> None:
    with pytest.raises(EngineError, match=r"room for 192 tokens.*may have 512.*context_length"):
        start_engine(llama, kv_cache_bytes=100_000)


def test_a_prompt_that_came_before_is_not_computed_again(
    start_engine: Callable[..., Any], llama: Path, reference: Reference
) -> None:
    asker = start_engine(llama, block_size=8, batched_tokens=8)
    first = asker.greedy(PROMPT, 5)
    before = asker.engine.statistics()
    assert asker.greedy(PROMPT, 5) == first
    after = asker.engine.statistics()
    assert after.found_tokens - before.found_tokens == 32
    assert after.prompt_tokens - before.prompt_tokens == 40
    # One step for the rest of the prompt, four for the other tokens of the answer.
    assert after.steps - before.steps == 5
    assert list(first.token_ids) == reference.generate(PROMPT, 5)
