"""Two ranks in two processes: the same answers as one, and an end when one of them is gone."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_apps.engine.protocol import EngineConfig, EngineError, SamplingParams
from serve_apps.engine.torch_engine.follower import follow

QUICKLY_S = 15.0


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


@pytest.mark.parametrize("name", ["gqa_llama", "llama"])
def test_answers_of_two_ranks_are_those_of_generate(
    name: str, request: pytest.FixtureRequest, start_replica: Callable[..., Any]
) -> None:
    reference = request.getfixturevalue(name.replace("llama", "reference"))
    asker = start_replica(request.getfixturevalue(name), max_batch=3).asker
    # More and longer prompts than one message holds, of different lengths, with more than fit at once.
    requests = [
        ([7], 20),
        ([9] * 40, 3),
        (list(range(1, 90)), 25),
        ([200, 3], 11),
        (list(range(40, 52)), 1),
    ] * 2

    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer(prompt, greedy(most)) for prompt, most in requests))

    alone = asker.greedy([11, 12, 13], 30)
    assert list(alone.token_ids) == reference.generate([11, 12, 13], 30)
    for (prompt, most), answer in zip(requests, asker.run(ask()), strict=True):
        assert list(answer.token_ids) == reference.generate(prompt, most)
    seeded = SamplingParams(max_tokens=10, seed=3, logprobs=1)
    first, second = (asker.run(asker.answer([5], seeded)) for _ in range(2))
    assert first.token_ids == second.token_ids


def test_no_rank_listens_beyond_loopback(start_replica: Callable[..., Any], llama: Path) -> None:
    def listening(pid: int) -> set[tuple[str, int]]:
        connections = psutil.Process(pid).net_connections("tcp")
        return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}

    before = listening(os.getpid())
    replica = start_replica(llama)
    ours = listening(os.getpid()) - before
    assert ours, "rank 0 listens for the others"
    for ip, _ in ours | listening(replica.follower.pid):
        assert ipaddress.ip_address(ip).is_loopback


def test_a_rank_that_cannot_load_its_shard_is_named(
    start_replica: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(llama, tmp_path / "model")
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EngineError):
        start_replica(broken)


def test_an_idle_replica_outlives_the_timeout_of_a_step(
    start_replica: Callable[..., Any], llama: Path
) -> None:
    replica = start_replica(llama, extra={"step_timeout_s": 1.0, "heartbeat_s": 0.2})
    asker = replica.asker
    end = time.monotonic() + 2.5
    asker.run(asker.until(lambda: time.monotonic() > end))
    asker.engine.check()
    assert len(asker.greedy([5], 3).token_ids) >= 1


@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_its_requests_with_an_error(
    fatal: signal.Signals, start_replica: Callable[..., Any], llama: Path
) -> None:
    replica = start_replica(llama, max_batch=1, extra={"step_timeout_s": 3.0})
    asker = replica.asker
    endless = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    began = 0.0

    def strike(answer: Any) -> bool:
        nonlocal began
        if not began:
            began = time.monotonic()
            os.kill(replica.follower.pid, fatal)
        return False

    async def ask() -> list[Any]:
        asks = [asker.answer([5], endless, strike), asker.answer([6], endless)]
        return await asyncio.gather(*asks, return_exceptions=True)

    results = asker.run(ask())
    assert all(isinstance(result, EngineError) for result in results), results
    assert time.monotonic() - began < QUICKLY_S
    with pytest.raises(EngineError):
        asker.engine.check()
    with pytest.raises(EngineError):
        asker.greedy([5], 1)
    replica.follower.kill()


def test_a_rank_that_dies_while_nobody_asks_is_noticed(
    start_replica: Callable[..., Any], llama: Path
) -> None:
    replica = start_replica(llama, extra={"heartbeat_s": 0.2})
    replica.follower.kill()

    def broken() -> bool:
        try:
            replica.asker.engine.check()
        except EngineError:
            return True
        return False

    replica.asker.run(replica.asker.until(broken))


RANK_0 = """
import asyncio, sys
from serve_apps.engine.protocol import EngineConfig
from serve_apps.engine.torch_engine.engine import TorchEngine

async def main():
    await TorchEngine(EngineConfig(sys.argv[1], tensor=2), "127.0.0.1", int(sys.argv[2])).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_other_ranks_end_when_rank_0_vanishes(llama: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", RANK_0, str(llama), str(port)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )

    async def both() -> None:
        following = asyncio.ensure_future(
            asyncio.to_thread(follow, EngineConfig(str(llama), tensor=2), 1, "127.0.0.1", port)
        )
        assert rank_0.stdout is not None
        await asyncio.to_thread(rank_0.stdout.readline)
        rank_0.kill()
        await asyncio.wait_for(following, QUICKLY_S)

    try:
        with pytest.raises(EngineError):
            asyncio.run(both())
    finally:
        rank_0.kill()
        rank_0.wait()
