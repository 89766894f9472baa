"""Tokens a second of the torch engine beside transformers' own `generate`; run by hand.

    python tests/benchmarks/engine_throughput.py [--json] [--batches 1 8 32] [--repeats 5]

Both run the same Llama of about 28 million random weights (hidden size 512, 8 layers, 8 heads, vocabulary
8192) on one thread, in fp32, greedily, without an end of sequence; a batch is so many prompts of equal
length with answers of equal length. They take turns (A B A B …) in one process, so that whatever else the
machine does falls on both; the figures are medians. A tenth of the answers' tokens may differ at most: two
different orders of adding floats decide near ties differently, and from there on the answers part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))

from serve_apps.engine.protocol import EngineConfig, SamplingParams
from serve_apps.engine.torch_engine.engine import TorchEngine

Answers = list[list[int]]


def save_model(directory: Path, vocab_size: int = 8192) -> None:
    """The model, and a tokenizer of one character a token that covers its vocabulary."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
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


def measure(directory: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """One row a batch size: median tokens/s of both, and the median of the ratios of neighbouring runs."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    engine = TorchEngine(EngineConfig(str(directory), max_batch=max(options.batches), threads=1))
    sampling = SamplingParams(max_tokens=options.answer_tokens, temperature=0.0, ignore_eos=True)
    rows = []
    with asyncio.Runner() as loop:
        loop.run(engine.start())

        async def one(name: str, prompt: list[int]) -> list[int]:
            return [
                token async for delta in engine.generate(name, prompt, sampling) for token in delta.token_ids
            ]

        async def all_of(prompts: Answers) -> Answers:
            return await asyncio.gather(*(one(str(index), prompt) for index, prompt in enumerate(prompts)))

        for batch in options.batches:
            prompts = torch.randint(1, model.config.vocab_size, (batch, options.prompt_tokens))
            mask = torch.ones_like(prompts)

            def ours(prompts: torch.Tensor = prompts) -> Answers:
                return loop.run(all_of(prompts.tolist()))

            def theirs(prompts: torch.Tensor = prompts, mask: torch.Tensor = mask) -> Answers:
                output = model.generate(
                    prompts,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=options.answer_tokens,
                    pad_token_id=0,
                )
                return output[:, prompts.shape[1] :].tolist()

            if (agreed := agreement(ours(), theirs())) < 0.9:
                raise SystemExit(
                    f"the answers agree in {agreed:.1%} of their tokens; the figures compare nothing"
                )
            seconds = [(timed(ours)[0], timed(theirs)[0]) for _ in range(options.repeats)]
            tokens = batch * options.answer_tokens
            rows.append(
                {
                    "batch": batch,
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
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=64)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory))
        rows = measure(Path(directory), options)
    if options.json:
        print(
            json.dumps(
                {"prompt_tokens": options.prompt_tokens, "answer_tokens": options.answer_tokens, "rows": rows}
            )
        )
        return
    print(f"{'batch':>5}  {'engine':>9}  {'generate':>9}  ratio (min–max)      tokens/s, one thread, fp32")
    for row in rows:
        print(
            f"{row['batch']:>5}  {row['engine_tokens_per_s']:>9.1f}  {row['generate_tokens_per_s']:>9.1f}  "
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})"
        )


if __name__ == "__main__":
    main()
