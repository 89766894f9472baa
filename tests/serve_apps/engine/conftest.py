"""Small models with a trained tokenizer, and the ways in which the tests use an engine."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from serve_apps.engine.protocol import Delta, Engine, EngineConfig, SamplingParams, TokenLogprob
from serve_apps.engine.torch_engine.engine import TorchEngine
from serve_apps.engine.torch_engine.follower import follow

DEADLINE_S = 60.0

needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")

# More threads than one only make these models slower.
torch.set_num_threads(1)

TEXT = [
    "def schedule(self): return the rows that run in the next step of the batch",
    "the quick brown fox jumps over the lazy dog while seven wizards brew a potion",
    "你好，世界。今天天气很好，我们去公园散步吧。",
    "Emoji: 😀🎉🚀 and accents: café, naïve, Zürich; the end.",
    "import torch\nimport numpy as np\n\nfor step in range(100):\n    loss.backward()\n",
] * 4


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with so few merges that emoji and Chinese span several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def save_llama(directory: Path, seed: int = 7, **sizes: Any) -> Path:
    """A Llama of random weights, wide enough apart that rounding never decides its next token."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=0,
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        | sizes,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), num_key_value_heads=4)


@pytest.fixture(scope="session")
def gqa_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("gqa"), num_key_value_heads=2)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 64 numbers: vLLM's kernels know no smaller ones."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    return save_llama(tmp_path_factory.mktemp("wide"), num_key_value_heads=2, **sizes)


class Reference:
    """What transformers alone says; the oracle of the tests."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, eos: bool = True) -> list[int]:
        """The greedy answer to one prompt, run alone."""
        ids = torch.tensor([list(prompt_ids)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **({} if eos else {"eos_token_id": None}),
        )
        return output[0, len(prompt_ids) :].tolist()

    def logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> torch.Tensor:
        """log_softmax of one plain forward pass, without a cache: [answer tokens, vocabulary]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt_ids, *answer_ids]]), use_cache=False).logits[0]
        return logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]


@pytest.fixture(scope="session")
def reference(llama: Path) -> Reference:
    return Reference(llama)


@pytest.fixture(scope="session")
def gqa_reference(gqa_llama: Path) -> Reference:
    return Reference(gqa_llama)


@dataclass(frozen=True)
class Answer:
    """All deltas of one request, put together."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_string: str | None = None

    def plus(self, delta: Delta) -> Answer:
        return Answer(
            self.text + delta.text,
            self.token_ids + delta.token_ids,
            self.logprobs + delta.logprobs,
            delta.finish_reason,
            delta.stop_string,
        )


class Asker:
    """An engine in an event loop of its own, driven from plain test functions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runner = asyncio.Runner()
        self._count = 0

    def run(self, awaitable: Awaitable[Any], deadline_s: float = DEADLINE_S) -> Any:
        """The result of a coroutine, which must come within the deadline."""

        async def within() -> Any:
            return await asyncio.wait_for(awaitable, deadline_s)

        return self.runner.run(within())

    async def answer(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        until: Callable[[Answer], bool] | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Answer:
        """Everything one request gains, or what it had when `until` was satisfied, where its reader left."""
        self._count += 1
        answer = Answer()
        deltas = self.engine.generate(f"request-{self._count}", prompt_ids, sampling, priority, cache_salt)
        try:
            async for delta in deltas:
                answer = answer.plus(delta)
                if until is not None and until(answer):
                    break
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        return answer

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int, **other: Any) -> Answer:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **other)
        return self.run(self.answer(prompt_ids, sampling))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; `run` bounds how long that may take."""
        while not condition():
            await asyncio.sleep(0.001)  # leaves the interpreter to the engine's thread meanwhile

    def close(self) -> None:
        self.run(self.engine.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def start_engine() -> Iterator[Callable[..., Asker]]:
    """Start engines that live as long as the test module."""
    askers: list[Asker] = []

    def start(directory: Path, **options: Any) -> Asker:
        asker = Asker(TorchEngine(EngineConfig(str(directory), **options)))
        asker.run(asker.engine.start())
        askers.append(asker)
        return asker

    yield start
    for asker in askers:
        asker.close()


@dataclass(frozen=True)
class Replica:
    """A tensor-parallel engine with the process of its rank 1."""

    asker: Asker
    follower: Any


@pytest.fixture
def start_replica() -> Iterator[Callable[..., Replica]]:
    """Start engines of two ranks, the second one in a process of its own."""
    # A server that has imported torch already, from which processes start in no time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([follow.__module__])
    replicas: list[Replica] = []

    def start(directory: Path, **options: Any) -> Replica:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = replace(EngineConfig(str(directory), tensor=2), **options)
        follower = context.Process(target=follow, args=(config, 1, "127.0.0.1", port))
        follower.start()
        replica = Replica(Asker(TorchEngine(config, "127.0.0.1", port)), follower)
        replicas.append(replica)
        replica.asker.run(replica.asker.engine.start())
        return replica

    yield start
    for replica in replicas:
        replica.asker.close()
        replica.follower.join(DEADLINE_S)
        if replica.follower.is_alive():
            replica.follower.kill()
            pytest.fail("rank 1 did not end with its engine")
