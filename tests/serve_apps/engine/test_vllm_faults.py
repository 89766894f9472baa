"""vLLM's processes killed and stopped: requests end with an error in time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.protocol import EngineConfig, EngineError, SamplingParams
from tests.serve_apps.engine.conftest import Asker, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), needs_vllm]

START_S = 300.0
STEP_TIMEOUT_S = 6.0
NOTICED_S = STEP_TIMEOUT_S + 6.0
"""Longest that requests may go on after a process is lost: the engine looks every second."""
STOPPED_S = 30.0
ENDLESS = SamplingParams(max_tokens=220, temperature=0.0, ignore_eos=True)


def vllm_processes(parent: int) -> dict[str, list[psutil.Process]]:
    """vLLM's processes under a process, by the name that they give themselves, without their rank."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(parent).children(recursive=True):
        title = ""
        with suppress(psutil.NoSuchProcess, IndexError):  # it has ended
            title = process.cmdline()[0]
        if title.startswith("VLLM::"):
            found.setdefault(title.removeprefix("VLLM::").rstrip("0123456789_TP"), []).append(process)
    return found


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that waits to be collected has."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def config(model: Path) -> EngineConfig:
    return EngineConfig(
        str(model),
        tensor=2,
        context_length=256,
        max_batch=2,
        kv_cache_bytes=64 * 2**20,
        extra={"enforce_eager": True, "step_timeout_s": STEP_TIMEOUT_S},
    )


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """The shared memory of vLLM that processes have open."""
    lines = [line for each in processes for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()]
    paths = {Path(line.rpartition(" ")[2]) for line in lines}
    return {path for path in paths if str(path).startswith(("/dev/shm/vllm_", "/dev/shm/psm_"))}


@pytest.mark.parametrize(
    ("title", "fatal", "asked"),
    [
        ("Worker", signal.SIGKILL, True),
        ("EngineCore", signal.SIGKILL, True),
        ("Worker", signal.SIGSTOP, True),
        ("EngineCore", signal.SIGSTOP, True),
        ("Worker", signal.SIGKILL, False),
    ],
)
def test_a_process_that_dies_or_hangs_ends_all_requests_and_all_processes(
    title: str, fatal: signal.Signals, asked: bool, wide: Path
) -> None:
    others = set(psutil.Process().children(recursive=True))
    asker = Asker(find_engine("vllm").load_engine()(config(wide), "127.0.0.1", 0))
    asker.run(asker.engine.start(), START_S)
    processes = set(psutil.Process().children(recursive=True)) - others
    named = vllm_processes(os.getpid())
    assert {name: len(found) for name, found in named.items()} == {"EngineCore": 1, "Worker": 2}
    assert len(asker.greedy([5], 4).token_ids) >= 1
    memory = shared_memory(processes)
    assert memory
    struck = 0.0

    def strike(answer: Any = None) -> bool:
        nonlocal struck
        if not struck:
            struck = time.monotonic()
            os.kill(named[title][-1].pid, fatal)
        return False

    def is_broken() -> bool:
        try:
            asker.engine.check()
        except EngineError:
            return True
        return False

    async def ask() -> list[Any]:
        # The third waits for a place.
        asks = [asker.answer([number], ENDLESS, strike) for number in (5, 6, 7)]
        return await asyncio.gather(*asks, return_exceptions=True)

    if asked:
        results = asker.run(ask())
        assert all(isinstance(result, EngineError) for result in results), results
    else:
        strike()
        asker.run(asker.until(is_broken))
    assert time.monotonic() - struck < NOTICED_S
    assert is_broken()
    with pytest.raises(EngineError):
        asker.greedy([5], 1)
    with pytest.raises(EngineError):
        asker.run(asker.engine.load_weights(str(wide)))
    stopping = time.monotonic()
    asker.close()
    assert time.monotonic() - stopping < STOPPED_S
    left = [each for each in left_of(list(processes)) if "resource_tracker" not in str(each.cmdline())]
    assert left == []
    assert [path for path in memory if path.exists()] == []


REPLICA = """
import asyncio, sys
from serve_apps.engine.protocol import EngineConfig, SamplingParams
from serve_apps.engine.vllm_engine import VllmEngine

async def main():
    extra = {"enforce_eager": True}
    config = EngineConfig(sys.argv[1], tensor=2, context_length=256, kv_cache_bytes=2**26, extra=extra)
    engine = VllmEngine(config)
    await engine.start()
    sampling = SamplingParams(max_tokens=220, ignore_eos=True)
    print("ready", flush=True)
    while True:
        async for _ in engine.generate("one", [5], sampling):
            pass

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["starting", "answering", "with a stopped worker"])
def test_nothing_of_vllm_outlives_a_killed_replica(moment: str, wide: Path, tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    root = Path(__file__).parents[3]
    replica = subprocess.Popen(
        [sys.executable, str(script), str(wide)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        text=True,
    )
    found: list[psutil.Process] = []
    try:
        if moment == "starting":
            until(lambda: "Worker" in vllm_processes(replica.pid), START_S)
        else:
            assert replica.stdout is not None
            while replica.stdout.readline() != "ready\n":
                assert replica.poll() is None
        found = psutil.Process(replica.pid).children(recursive=True)
        memory = shared_memory(found) if moment != "starting" else set()
        if moment == "with a stopped worker":
            os.kill(vllm_processes(replica.pid)["Worker"][0].pid, signal.SIGSTOP)
        replica.kill()
        replica.wait()
        until(lambda: left_of(found) == [], STOPPED_S)
        until(lambda: not any(path.exists() for path in memory), STOPPED_S)
    finally:
        replica.kill()
        for process in left_of(found):
            process.kill()
