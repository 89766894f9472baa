"""What a long prompt costs: its own first token, and the flow of a stream beside it; run by hand.

    python tests/benchmarks/long_prompts.py [--json] [--precision bf16] [--repeats 3]

A Llama of about 5 million random weights (hidden size 256, 4 layers, 8 heads, vocabulary 8192) on one thread:

- `first token`: seconds from a prompt of so many tokens to its first token, of the torch engine and of
  transformers' own `generate` (with PyTorch's fused attention), which take turns; nothing else runs.
- `stream`: the time between two tokens of one answer for three seconds before a prompt of 30,000 tokens
  comes (`alone`), and from its arrival to its first token (`beside`); milliseconds.

In fp32 both must give the same first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))

from serve_apps.engine.protocol import EngineConfig, SamplingParams
from serve_apps.engine.torch_engine.engine import TorchEngine
from tests.benchmarks.engine_throughput import save_model

VOCABULARY = 8192
CONTEXT = 32768
LONG = 30_000


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1, VOCABULARY) for _ in range(num_tokens)]


class Engine:
    """The torch engine, asked from plain functions."""

    def __init__(self, directory: Path, precision: Any, extra: dict[str, Any]) -> None:
        self._engine = TorchEngine(
            EngineConfig(str(directory), precision=precision, max_batch=8, prefix_caching=False, **extra)
        )
        self._loop = asyncio.Runner()
        self._loop.run(self._engine.start())

    def close(self) -> None:
        self._loop.run(self._engine.stop())
        self._loop.close()

    async def _times(self, name: str, prompt: list[int], num_tokens: int) -> tuple[list[float], list[int]]:
        """When each token came, and the tokens."""
        times, tokens = [], []
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        async for delta in self._engine.generate(name, prompt, sampling):
            times.append(time.perf_counter())
            tokens += delta.token_ids
        return times, tokens

    def first(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and the token."""
        begin = time.perf_counter()
        times, tokens = self._loop.run(self._times("one", prompt, 1))
        return times[0] - begin, tokens[0]

    def beside(self, prompt: list[int], alone_s: float) -> tuple[list[float], list[float], float]:
        """Gaps of a stream in seconds, before a prompt comes and until its first token; that token's time."""

        async def ask() -> tuple[list[float], list[float], float]:
            most = CONTEXT - 100
            stream = self._engine.generate(
                "stream", prompt_of(64, 1), SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
            )
            times: list[float] = []

            async def follow() -> None:
                async for _ in stream:
                    times.append(time.perf_counter())

            following = asyncio.ensure_future(follow())
            await asyncio.sleep(alone_s)
            arrived = time.perf_counter()
            (first, *_), _ = await self._times("long", prompt, 1)
            following.cancel()
            await asyncio.wait([following])
            gaps = [(at, at - before) for before, at in itertools.pairwise(times)]
            alone = [gap for at, gap in gaps if at <= arrived]
            return alone, [gap for at, gap in gaps if arrived < at <= first], first - arrived

        return self._loop.run(ask())


def first_of_generate(model: Any, prompt: list[int]) -> tuple[float, int]:
    ids = torch.tensor([prompt])
    begin = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1, pad_token_id=0
    )
    return time.perf_counter() - begin, int(output[0, -1])


def measure_first(engine: Engine, model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for length in options.lengths:
        prompt = prompt_of(length, seed=length)
        pairs = []
        for _ in range(options.repeats):
            (mine, token), (other, expected) = engine.first(prompt), first_of_generate(model, prompt)
            if options.precision == "fp32" and token != expected:
                raise SystemExit(f"the first token after {length} tokens is {token}, not {expected}")
            pairs.append((mine, other))
        rows.append(
            {
                "prompt_tokens": length,
                "engine_s": statistics.median(mine for mine, _ in pairs),
                "generate_s": statistics.median(other for _, other in pairs),
                "ratio": statistics.median(mine / other for mine, other in pairs),
            }
        )
    return rows


def measure_stream(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for number in range(options.repeats):
        alone, beside, first_s = engine.beside(prompt_of(LONG, seed=number), alone_s=3.0)
        row: dict[str, Any] = {"first_token_s": first_s, "tokens_beside": len(beside)}
        for name, gaps in (("alone", alone), ("beside", beside)):
            ordered = sorted(1000 * gap for gap in gaps)
            row |= {
                f"{name}_p50_ms": statistics.median(ordered),
                f"{name}_p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
                f"{name}_max_ms": ordered[-1],
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--lengths", nargs="*", type=int, default=[2000, 8000, LONG])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prefill-ms", type=float, help="limits.prefill_ms; default: the engine's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("first", "stream"))
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    extra = {} if options.prefill_ms is None else {"prefill_ms": options.prefill_ms}
    document: dict[str, Any] = {"precision": options.precision}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_model(
            directory,
            VOCABULARY,
            hidden_size=options.hidden_size,
            num_layers=options.layers,
            context_length=CONTEXT,
        )
        engine = Engine(directory, options.precision, extra)
        if options.only != "stream":
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
            document["first_token"] = measure_first(engine, model, options)
        if options.only != "first":
            document["stream"] = measure_stream(engine, options)
        engine.close()
    if options.json:
        print(json.dumps(document))
        return
    for row in document.get("first_token", ()):
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    for row in document.get("stream", ()):
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
