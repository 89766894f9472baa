"""Tokens a second of the torch engine beside transformers' own `generate`; run by hand.

    python tests/benchmarks/engine_throughput.py [--json] [--precision bf16] [--repeats 5]

Both run the same Llama of about 28 million random weights (hidden size 512, 8 layers, 8 heads, vocabulary
8192) on one thread, greedily, without an end of sequence, at most 32 requests at a time, under two loads:

- `equal`: 32 requests, prompts of 64 tokens, answers of 64;
- `mixed`: 96 requests, prompts of 8 to 64 tokens, answers of 8 to 128, in random order. `generate` takes
  them 32 at a time, padded to the left, each batch until its longest answer is there; only tokens that were
  asked for count.

They take turns (A B A B …) in one process, so that whatever else the machine does falls on both; the figures
are medians. In fp32 nine tenths of the tokens must be the same: two different orders of adding floats decide
near ties differently, and from there on the answers part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))

from serve_apps.engine.protocol import EngineConfig, SamplingParams
from serve_apps.engine.torch_engine.engine import TorchEngine

Answers = list[list[int]]
BATCH = 32


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    answer_tokens: int


def equal_load(vocab_size: int) -> list[Request]:
    chance = random.Random(1)
    return [Request([chance.randrange(1, vocab_size) for _ in range(64)], 64) for _ in range(BATCH)]


def mixed_load(vocab_size: int) -> list[Request]:
    chance = random.Random(2)
    return [
        Request(
            [chance.randrange(1, vocab_size) for _ in range(chance.randint(8, 64))], chance.randint(8, 128)
        )
        for _ in range(3 * BATCH)
    ]


LOADS = {"equal": equal_load, "mixed": mixed_load}


def save_model(
    directory: Path,
    vocab_size: int = 8192,
    *,
    hidden_size: int = 512,
    num_layers: int = 8,
    context_length: int = 1024,
) -> None:
    """The model, and a tokenizer of one character a token that covers its vocabulary."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=context_length,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    letters = {chr(0x4E00 + index): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def timed(run: Callable[[], Answers]) -> tuple[float, Answers]:
    begin = time.perf_counter()
    answers = run()
    return time.perf_counter() - begin, answers


def agreement(ours: Answers, theirs: Answers) -> float:
    pairs = [
        (a, b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def generate(model: Any, requests: list[Request]) -> Answers:
    """The answers by transformers' `generate`, a batch at a time."""
    answers = []
    for first in range(0, len(requests), BATCH):
        batch = requests[first : first + BATCH]
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        most = max(request.answer_tokens for request in batch)
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=most, pad_token_id=0
        )
        answers += [
            output[row, longest : longest + request.answer_tokens].tolist()
            for row, request in enumerate(batch)
        ]
    return answers


def measure(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a load: median tokens/s of both, and the median of the ratios of neighbouring runs."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    engine = TorchEngine(
        EngineConfig(
            str(directory), precision=options.precision, max_batch=BATCH, threads=1, prefix_caching=False
        )
    )
    rows = []
    with asyncio.Runner() as loop:
        loop.run(engine.start())

        async def one(name: str, request: Request) -> list[int]:
            sampling = SamplingParams(max_tokens=request.answer_tokens, temperature=0.0, ignore_eos=True)
            deltas = engine.generate(name, request.prompt, sampling)
            return [token async for delta in deltas for token in delta.token_ids]

        async def all_of(requests: list[Request]) -> Answers:
            return await asyncio.gather(*(one(str(i), request) for i, request in enumerate(requests)))

        for load in options.loads:
            requests = LOADS[load](model.config.vocab_size)

            def ours(requests: list[Request] = requests) -> Answers:
                return loop.run(all_of(requests))

            def theirs(requests: list[Request] = requests) -> Answers:
                return generate(model, requests)

            agreed = agreement(ours(), theirs())
            if options.precision == "fp32" and agreed < 0.9:
                raise SystemExit(f"the answers agree in {agreed:.1%} of their tokens; this compares nothing")
            seconds = [(timed(ours)[0], timed(theirs)[0]) for _ in range(options.repeats)]
            tokens = sum(request.answer_tokens for request in requests)
            rows.append(
                {
                    "load": load,
                    "tokens": tokens,
                    "engine_tokens_per_s": tokens / statistics.median(mine for mine, _ in seconds),
                    "generate_tokens_per_s": tokens / statistics.median(other for _, other in seconds),
                    "ratio": statistics.median(other / mine for mine, other in seconds),
                    "ratio_min": min(other / mine for mine, other in seconds),
                    "ratio_max": max(other / mine for mine, other in seconds),
                    "same_tokens": agreed,
                }
            )
        loop.run(engine.stop())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory))
        rows = measure(Path(directory), options)
    if options.json:
        print(json.dumps({"precision": options.precision, "rows": rows}))
        return
    print(
        f"{'load':>6}  {'engine':>9}  {'generate':>9}  ratio (min–max)      "
        f"tokens/s, one thread, {options.precision}"
    )
    for row in rows:
        print(
            f"{row['load']:>6}  {row['engine_tokens_per_s']:>9.1f}  {row['generate_tokens_per_s']:>9.1f}  "
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})"
        )


if __name__ == "__main__":
    main()
