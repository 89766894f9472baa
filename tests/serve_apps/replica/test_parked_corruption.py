"""Parked engines whose memory rots: a thousand times parked, and none that answers wrongly."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.config.sections.serve import ServeAppConfig
from cluster.node.dial import DialAddress
from cluster.node.node_agent import NodeAgent, modules_of_processes
from serve_apps.engine.protocol import EngineError
from serve_apps.replica.engine_processes import EngineProcesses
from serve_apps.spec import AppSpec
from tests.serve_apps.tiny_model import make_tokenizer

CYCLES = 1000
NEEDLE = 32
MOST_BYTES = 256 * 2**20
"""What is larger at once is no part of a model that is so small."""
PROMPT = [5, 6, 7]


class Memory:
    """The memory of another process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def find(self, needle: bytes) -> list[int]:
        """Every place where these bytes are, that the process alone has."""
        found = []
        with open(f"/proc/{self._pid}/mem", "rb") as memory:
            for start, end in self._own():
                memory.seek(start)
                try:
                    content = memory.read(end - start)
                except OSError:
                    continue
                at = content.find(needle)
                while at >= 0:
                    found.append(start + at)
                    at = content.find(needle, at + 1)
        return found

    def flip(self, address: int, bit: int) -> None:
        """Turn one bit of a byte round."""
        with open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            (byte,) = memory.read(1)
            memory.seek(address)
            memory.write(bytes([byte ^ 1 << bit]))

    def _own(self) -> Iterator[tuple[int, int]]:
        for line in Path(f"/proc/{self._pid}/maps").read_text().splitlines():
            span, mode, *rest = line.split()
            if "r" in mode and "p" in mode and (mode[1] == "w" or line.endswith(".safetensors")):
                start, end = (int(each, 16) for each in span.split("-"))
                if rest[-1:] != ["[vvar]"] and end - start < MOST_BYTES:
                    yield start, end


class Rotting:
    """An engine of one or two ranks that is parked again and again."""

    def __init__(self, agent: NodeAgent, spec: AppSpec, weights: dict[str, torch.Tensor]) -> None:
        self.agent = agent
        self.spec = spec
        self.weights = [tensor.detach().contiguous().numpy().tobytes() for tensor in weights.values()]
        self.draw = random.Random(31)
        self.engine: EngineProcesses | None = None

    async def start(self) -> None:
        async def ask(whom: DialAddress) -> None:
            await asyncio.to_thread(self.agent.fork_for, whom, "a test's")

        async def nothing() -> dict[str, str]:
            return {}

        self.nothing = nothing
        self.engine = EngineProcesses(
            secrets.token_hex(4), "127.0.0.1", ask, on_lost=lambda why: None, on_orphans=lambda keys: None
        )
        await self.engine.start(self.spec, 1, nothing(), parks=True)

    async def answer(self) -> list[int]:
        assert self.engine is not None
        request: dict[str, Any] = {"request_id": secrets.token_hex(8), "prompt": PROMPT, "max_tokens": 12}
        request |= {"sampling": {"temperature": 0.0, "ignore_eos": True}, "streamed": False}
        found = await self.engine.call("generate", request, None)
        assert "error" not in found, found
        return list(found["token_ids"])

    def rot(self) -> bool:
        """Turn a bit of a weight round wherever it is in a rank's memory; whether it was found."""
        assert self.engine is not None
        memory = Memory(self.draw.choice(self.engine.pids()))
        content = self.draw.choice(self.weights)
        at = self.draw.randrange(len(content) - NEEDLE)
        places = memory.find(content[at : at + NEEDLE])
        bit = self.draw.randrange(8)
        for place in places:
            memory.flip(place, bit)
        return bool(places)


@pytest.fixture(scope="module")
def agent() -> Iterator[NodeAgent]:
    agent = NodeAgent(f"\0test-rot-{secrets.token_hex(8)}", modules_of_processes())
    yield agent
    agent.stop()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("tensor", "cycles"), [(1, CYCLES - 200), (2, 200)])
def test_none_that_was_parked_answers_wrongly(
    tensor: int, cycles: int, agent: NodeAgent, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    make_tokenizer(tmp_path)
    config = LlamaConfig(
        vocab_size=json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"].__len__() + 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    app = ServeAppConfig.model_validate({"model": str(tmp_path), "tensor": tensor})
    spec = AppSpec("chat", app, model_path=str(tmp_path), model_version="m@1", engine="torch")
    rotting = Rotting(agent, spec, dict(model.named_parameters()))
    counts = {"woken": 0, "refused": 0, "rotten": 0}

    async def go() -> None:
        await rotting.start()
        for _ in range(cycles):
            assert rotting.engine is not None
            assert await rotting.engine.park(None) is not None
            rotten = rotting.draw.random() < 0.3 and rotting.rot()
            counts["rotten"] += rotten
            try:
                await rotting.engine.wake(1, rotting.nothing(), early=True)
                counts["woken"] += 1
            except EngineError:
                counts["refused"] += 1
                await rotting.engine.stop(gently=False)
                await rotting.start()
            assert await rotting.answer() == expected
        await rotting.engine.stop()

    asyncio.run(go())
    print(counts)
    assert counts["refused"] == counts["rotten"] > cycles // 5
    left = [
        each
        for each in psutil.process_iter(["cmdline"])
        if "shoal::Engine:chat:" in " ".join(each.info["cmdline"] or [])
    ]
    assert left == []
