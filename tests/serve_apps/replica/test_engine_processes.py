"""The processes of an engine, forked by a node's agent: started, told of, and ended again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from cluster.config.sections.serve import ServeAppConfig
from cluster.node.dial import DialAddress
from cluster.node.node_agent import NodeAgent, modules_of_processes
from serve_apps.engine.protocol import EngineError, Statistics
from serve_apps.replica import engine_processes
from serve_apps.replica.engine_line import LineLostError
from serve_apps.replica.engine_processes import EngineProcesses
from serve_apps.spec import AppSpec
from tests.serve_apps.fake_engine import make_fake_model

ENGINE = "tests.serve_apps.fake_engine:FakeEngine"
NOBODY_S = 20.0


@pytest.fixture(scope="module")
def agent() -> Iterator[NodeAgent]:
    agent = NodeAgent(f"\0test-engines-{secrets.token_hex(8)}", modules_of_processes())
    yield agent
    agent.stop()


def spec_of(model: Path, **behaviour: object) -> AppSpec:
    make_fake_model(model, **behaviour)
    config = ServeAppConfig.model_validate({"model": str(model)})
    return AppSpec("chat", config, model_path=str(model), model_version="m@1", engine=ENGINE)


def processes_of(replica: str) -> list[psutil.Process]:
    """Those of the engine of a replica."""
    title = f"shoal::Engine:chat:{replica}:"
    return [each for each in psutil.process_iter() if title in " ".join(_command(each))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def nobody_left(replica: str) -> None:
    async with asyncio.timeout(NOBODY_S):
        while processes_of(replica):
            await asyncio.sleep(0.05)


class Hearing:
    """A replica, as its engine's processes know it."""

    def __init__(self, agent: NodeAgent) -> None:
        self.id = secrets.token_hex(4)
        self.lost: list[str] = []

        async def ask(whom: DialAddress) -> None:
            await asyncio.to_thread(agent.fork_for, whom, "a test's")

        self.engine = EngineProcesses(
            self.id, "127.0.0.1", ask, on_lost=self.lost.append, on_orphans=lambda keys: None
        )


async def no_devices() -> dict[str, str]:
    return {}


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60.0):
            await work()

    asyncio.run(main())


def test_an_engine_that_is_ready_has_figures_at_once(agent: NodeAgent, tmp_path: Path) -> None:
    """Whoever counts replicas would find none in what it has not said yet."""
    spec, hearing = spec_of(tmp_path / "m"), Hearing(agent)

    async def go() -> None:
        assert await hearing.engine.start(spec, 1, no_devices()) == 2048
        assert hearing.engine.statistics.keys() == {field.name for field in fields(Statistics)}
        assert len(processes_of(hearing.id)) == 1
        await hearing.engine.stop()
        await nobody_left(hearing.id)
        assert hearing.lost == []

    run(go)


def test_an_engine_on_cpus_loads_while_its_devices_are_still_somebody_elses(
    agent: NodeAgent, tmp_path: Path
) -> None:
    spec, hearing, free = spec_of(tmp_path / "m"), Hearing(agent), asyncio.Event()

    async def devices() -> dict[str, str]:
        await free.wait()
        return {}

    async def go() -> None:
        starting = asyncio.create_task(hearing.engine.start(spec, 1, devices()))
        while not hearing.engine.statistics:  # its engine runs, and says how it is
            assert not starting.done()
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert not starting.done(), "and it is not ready before they are its own"
        free.set()
        await starting
        await hearing.engine.stop()

    run(go)


def test_an_engine_that_is_wanted_no_more_while_it_starts_leaves_nothing(
    agent: NodeAgent, tmp_path: Path
) -> None:
    spec, hearing = spec_of(tmp_path / "m", fails="hang"), Hearing(agent)

    async def go() -> None:
        starting = asyncio.create_task(hearing.engine.start(spec, 1, no_devices()))
        while not list((tmp_path / "m").glob("hangs-*")):
            await asyncio.sleep(0.05)
        starting.cancel()
        await asyncio.wait({starting})
        await hearing.engine.stop(gently=False)
        await nobody_left(hearing.id)
        assert hearing.lost == []

    run(go)


def test_a_parked_engine_keeps_its_processes_and_goes_on(agent: NodeAgent, tmp_path: Path) -> None:
    spec, hearing = spec_of(tmp_path / "m"), Hearing(agent)

    async def go() -> None:
        await hearing.engine.start(spec, 1, no_devices(), parks=True)
        (process,) = processes_of(hearing.id)
        taken = await hearing.engine.park(None)
        assert taken is not None
        assert 2**20 < taken["bytes"] < 2**30
        assert taken["most_bytes"] == psutil.virtual_memory().total // 10
        assert await hearing.engine.wake(2, no_devices(), early=True) == 2048
        assert processes_of(hearing.id) == [process]
        await hearing.engine.stop()
        await nobody_left(hearing.id)
        assert hearing.lost == []

    run(go)


def test_an_engine_wakes_while_its_devices_are_still_somebody_elses(agent: NodeAgent, tmp_path: Path) -> None:
    spec, hearing, free = spec_of(tmp_path / "m"), Hearing(agent), asyncio.Event()

    async def devices() -> dict[str, str]:
        await free.wait()
        return {}

    async def go() -> None:
        await hearing.engine.start(spec, 1, no_devices())
        await hearing.engine.park(None)
        waking = asyncio.create_task(hearing.engine.wake(1, devices(), early=True))
        await asyncio.sleep(0.5)
        assert not waking.done()
        free.set()
        assert await waking == 2048
        await hearing.engine.stop()

    run(go)


@pytest.mark.parametrize("early", [True, False])
def test_an_engine_on_other_devices_of_its_node_does_not_wake(
    early: bool, agent: NodeAgent, tmp_path: Path
) -> None:
    spec, hearing = spec_of(tmp_path / "m"), Hearing(agent)

    async def shown(number: str) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": number}

    async def go() -> None:
        await hearing.engine.start(spec, 1, shown("3"))
        await hearing.engine.park(None)
        if early:  # a computer on CPUs has none
            await hearing.engine.wake(1, no_devices(), early=True)
        else:
            with pytest.raises(EngineError, match="other devices"):
                await hearing.engine.wake(1, shown("2"), early=False)
        await hearing.engine.stop(gently=False)

    run(go)


@pytest.mark.parametrize(
    ("fails", "match"),
    [("wake", "another one now"), ("differ", "does not answer as it did"), ("sleep", None)],
)
def test_an_engine_that_is_not_what_it_was_does_not_wake(
    fails: str, match: str | None, agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_processes, "PARK_TIMEOUT_S", 2.0)
    spec, hearing = spec_of(tmp_path / "m", fails=fails), Hearing(agent)

    async def go() -> None:
        await hearing.engine.start(spec, 1, no_devices())
        assert await hearing.engine.park(None) is not None
        with pytest.raises(EngineError if match else TimeoutError, match=match):
            await hearing.engine.wake(1, no_devices(), early=True)
        await hearing.engine.stop(gently=False)
        await nobody_left(hearing.id)
        assert hearing.lost == []

    run(go)


@pytest.mark.parametrize(("fails", "most_bytes"), [("stay", None), ("nothing", 10)])
def test_an_engine_that_may_not_be_parked_goes_on(
    fails: str, most_bytes: int | None, agent: NodeAgent, tmp_path: Path
) -> None:
    """It does not do that, or its weights are too large."""
    spec, hearing = spec_of(tmp_path / "m", fails=fails), Hearing(agent)

    async def go() -> None:
        await hearing.engine.start(spec, 1, no_devices())
        assert await hearing.engine.park(most_bytes) is None
        (process,) = processes_of(hearing.id)
        process.kill()
        async with asyncio.timeout(10.0):
            while not hearing.lost:
                await asyncio.sleep(0.05)
        await hearing.engine.stop(gently=False)

    run(go)


def test_whoever_keeps_a_parked_engine_hears_of_its_end(agent: NodeAgent, tmp_path: Path) -> None:
    spec, hearing = spec_of(tmp_path / "m"), Hearing(agent)

    async def go() -> None:
        await hearing.engine.start(spec, 1, no_devices())
        await hearing.engine.park(None)
        (process,) = processes_of(hearing.id)
        process.kill()
        assert "SIGKILL" in await hearing.engine.ended()
        assert hearing.lost == [], "a replica with a parked engine does not end for that"
        with pytest.raises(LineLostError):
            await hearing.engine.wake(1, no_devices(), early=True)
        await hearing.engine.stop(gently=False)

    run(go)


def test_an_engine_that_does_not_start_says_why(agent: NodeAgent, tmp_path: Path) -> None:
    spec, hearing = spec_of(tmp_path / "m", fails="start"), Hearing(agent)

    async def go() -> None:
        with pytest.raises(EngineError, match="this model does not start"):
            await hearing.engine.start(spec, 1, no_devices())
        await hearing.engine.stop(gently=False)
        await nobody_left(hearing.id)

    run(go)
