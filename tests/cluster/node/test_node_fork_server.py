"""One fork server on a node for all who have processes there: each is what its owner would have made."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.hosts.processes import CLUSTER_ID, NODE_NAME
from cluster.node import node_agent
from cluster.node.forked_processes import ForkedProcesses, ProcessEnd
from cluster.node.memory import MARKS, memory_by_kind, memory_of
from cluster.node.node_agent import NodeAgent, modules_of_processes
from cluster.node.sessions import has_ended
from cluster.node.surroundings import Surroundings

ROOT = str(Path(__file__).parents[3])
FORKED = "tests.cluster.node.forked"


@contextmanager
def kept(*modules: str, address: str = "") -> Iterator[tuple[NodeAgent, str]]:
    """A node's agent, and where its fork server listens."""
    address = address or f"\0test-forks-{secrets.token_hex(8)}"
    agent = NodeAgent(address, modules or [FORKED])
    try:
        yield agent, address
    finally:
        agent.stop()


@pytest.fixture(autouse=True)
def _whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    if ROOT not in sys.path:
        monkeypatch.syspath_prepend(ROOT)


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What the condition is, once it is something."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline, "it took too long"
        pause.wait(0.02)
    return found


def told(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


async def run_one(forks: ForkedProcesses, path: Path) -> tuple[ProcessEnd, dict[str, Any]]:
    arguments = {"path": str(path)}
    end = await asyncio.wait_for(forks.run("one", f"{FORKED}:tell", arguments, "a title"), 30)
    return end, told(path)


async def run_and_close(forks: ForkedProcesses, path: Path) -> tuple[ProcessEnd, dict[str, Any]]:
    found = await run_one(forks, path)
    await forks.close()
    return found


def forks_at(address: str) -> ForkedProcesses:
    return ForkedProcesses([], address, lambda: True, title="tests")


def refusal(said: str) -> str | None:
    """Why the node's fork server was not used, as what was printed tells."""
    found = re.search(r"fork server is not used(?: for tests)?: (.*); another one is started", said)
    return found and found[1]


def own_servers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if "cluster.node.fork_server" in " ".join(each.cmdline())]


def test_a_process_has_around_it_what_its_owner_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        monkeypatch.setenv("MINE", "yes")
        monkeypatch.setenv("SHOAL_NODE", "one-of-two")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        forks = forks_at(address)
        end, found = asyncio.run(run_and_close(forks, tmp_path / "told"))
        assert end == ProcessEnd(0, False)
        assert (found["mine"], found["directory"], found["path"]) == ("yes", str(tmp_path), sys.path)
        assert found["title"] == "a title"
        assert found["shown"]["SHOAL_NODE"] == "one-of-two", "others see it too"
        said = capfd.readouterr().out
        assert "told" in said, "its output is its owner's"
        assert refusal(said) is None
        assert not own_servers()
        assert found["servers_title"] == "shoal::ForkServer:tests"
        server = agent.facts()["pid"]
        assert found["parent"] not in (server, os.getpid()), "its owner has a server of its own"
        assert memory_by_kind([server])["ForkServer"] > memory_by_kind([])["ForkServer"] + 2**20


def test_what_a_fork_had_to_import_those_that_come_later_have_already(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model's own files: there are hundreds of families, and few of them on a node."""
    family = "transformers.models.qwen2.configuration_qwen2"

    async def run(address: str, function: str, name: str, path: Path) -> Any:
        forks = forks_at(address)
        arguments = {"path": str(path), "name": name}
        end = await asyncio.wait_for(forks.run("one", f"{FORKED}:{function}", arguments, "a title"), 60)
        await forks.close()
        assert end == ProcessEnd(0, False)
        return told(path)

    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        server = psutil.Process(agent.facts()["pid"])
        asyncio.run(run(address, "only_say", "transformers.models.of_nobody", tmp_path / "wrong"))
        asyncio.run(run(address, "only_say", "tests.cluster.node.changing", tmp_path / "not told"))
        first = asyncio.run(run(address, "import_and_tell", family, tmp_path / "first"))
        assert first == {"had": False, "has": True}
        later = (tmp_path / f"later-{number}" for number in range(200))
        until(lambda: asyncio.run(run(address, "import_and_tell", family, next(later)))["had"], 60)
        assert (server.is_running(), server.num_threads()) == (True, 1)
        said = capfd.readouterr().err
        assert "No module named 'transformers.models.of_nobody'" in said, "and the server goes on"


def test_memory_is_told_by_what_processes_are_and_of_one_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MARKS == (CLUSTER_ID, NODE_NAME)

    async def go(address: str) -> None:
        forks = forks_at(address)
        stays = asyncio.create_task(
            forks.run("one", f"{FORKED}:stay", {"path": str(tmp_path / "stays")}, "shoal::Sleeper:here")
        )
        await asyncio.to_thread(until, lambda: told(tmp_path / "stays"))
        found = memory_by_kind([])
        assert found["Sleeper"] > 2**20
        assert found["ForkServer"] > 2**20, "its owner's"
        monkeypatch.setenv(NODE_NAME, "another")
        assert memory_by_kind([]) == {"ForkServer": 0}
        await forks.end("one")
        await stays
        await forks.close()

    monkeypatch.setenv(CLUSTER_ID, secrets.token_hex(4))
    monkeypatch.setenv(NODE_NAME, "one-of-two")
    with kept() as (_, address):
        asyncio.run(go(address))


def test_who_comes_before_the_imports_are_done_waits_for_them(tmp_path: Path) -> None:
    with kept("tests.cluster.node.slow_import") as (_, address):
        end, _ = asyncio.run(run_and_close(forks_at(address), tmp_path / "told"))
        assert end.code == 0
        assert not own_servers()


def test_a_module_that_cannot_be_imported_keeps_nobody_from_the_others(tmp_path: Path) -> None:
    with kept("no.such.module", FORKED) as (_, address):
        end, _ = asyncio.run(run_and_close(forks_at(address), tmp_path / "told"))
        assert end.code == 0


def test_the_end_of_a_nodes_fork_server_ends_nobodys_processes(tmp_path: Path) -> None:
    async def go(agent: NodeAgent, address: str) -> None:
        forks = forks_at(address)
        stays = asyncio.create_task(forks.run("one", f"{FORKED}:stay", {"path": str(tmp_path / "stays")}))
        found = await asyncio.to_thread(until, lambda: told(tmp_path / "stays"))
        first = agent.facts()["pid"]
        os.kill(first, signal.SIGKILL)
        end, _ = await run_and_close(
            forks_at(address), tmp_path / "told"
        )  # a new owner waits for the next server
        assert end.code == 0
        assert agent.facts()["pid"] not in (None, first)
        assert (await run_one(forks, tmp_path / "again"))[0].code == 0, "who is there goes on"
        assert not stays.done()
        assert not has_ended(found["pid"])
        await forks.end("one")
        assert (await stays).code == -signal.SIGKILL
        await forks.close()

    with kept() as (agent, address):
        asyncio.run(go(agent, address))


def test_an_owner_whose_own_fork_server_ends_is_told_and_gets_another(tmp_path: Path) -> None:
    async def go(address: str) -> None:
        forks = forks_at(address)
        stays = asyncio.create_task(forks.run("one", f"{FORKED}:stay", {"path": str(tmp_path / "stays")}))
        found = await asyncio.to_thread(until, lambda: told(tmp_path / "stays"))
        os.kill(found["parent"], signal.SIGKILL)
        with pytest.raises(ConnectionError, match="fork server"):
            await asyncio.wait_for(stays, 10)
        await asyncio.to_thread(until, lambda: has_ended(found["pid"]))
        end, again = await run_and_close(forks, tmp_path / "told")
        assert end.code == 0
        assert again["parent"] != found["parent"]
        assert not own_servers()

    with kept() as (_, address):
        asyncio.run(go(address))


def test_what_was_forked_goes_on_when_the_agent_ends(tmp_path: Path) -> None:
    async def go(agent: NodeAgent, address: str) -> None:
        forks = forks_at(address)
        stays = asyncio.create_task(forks.run("one", f"{FORKED}:stay", {"path": str(tmp_path / "stays")}))
        await asyncio.to_thread(until, lambda: told(tmp_path / "stays"))
        await asyncio.to_thread(agent.stop)
        assert (await run_one(forks, tmp_path / "told"))[0].code == 0
        assert not stays.done()
        await forks.end("one")
        await stays
        await forks.close()

    with kept() as (agent, address):
        asyncio.run(go(agent, address))


def test_the_processes_of_an_owner_that_is_killed_end(tmp_path: Path) -> None:
    with kept() as (_, address):
        command = [sys.executable, "-m", "tests.cluster.node.owner", address[1:], str(tmp_path / "stays")]
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ROOT}) as owner:
            found = until(lambda: told(tmp_path / "stays"))
            assert not has_ended(found["pid"])
            owner.kill()
        until(lambda: has_ended(found["pid"]) and has_ended(found["parent"]), 10)


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "TRANSFORMERS_CACHE", "LD_BIND_NOW"])
def test_who_has_another_environment_at_its_imports_has_a_server_of_its_own(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        monkeypatch.setenv(variable, "1")
        forks = forks_at(address)
        assert asyncio.run(run_and_close(forks, tmp_path / "told"))[0].code == 0
        assert refusal(capfd.readouterr().out) == f"its environment has other {variable}"
        assert not own_servers()


def test_the_environment_of_a_ray_job_fits_and_its_lines_are_written_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray gives jobs both variables, in other ways than workers."""
    for name in ("PYTHONUNBUFFERED", "PYTHONBREAKPOINT"):
        monkeypatch.delenv(name, raising=False)

    async def go(address: str) -> None:
        forks = forks_at(address)
        stays = asyncio.create_task(forks.run("one", f"{FORKED}:say_and_stay", {}))
        said: list[str] = []

        def is_said() -> bool:
            said.append(capfd.readouterr().out)
            return "said at once" in said[-1]

        await asyncio.to_thread(until, is_said, 5)
        assert refusal("".join(said)) is None
        assert not own_servers()
        await forks.end("one")
        await stays
        await forks.close()

    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
        monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
        asyncio.run(go(address))


def test_who_has_another_package_of_a_name_has_a_server_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "psutil.py").write_text("")
    with kept("psutil", FORKED) as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        monkeypatch.syspath_prepend(str(tmp_path))
        forks = forks_at(address)
        assert asyncio.run(run_and_close(forks, tmp_path / "told"))[0].code == 0
        assert refusal(capfd.readouterr().out) == f"it has psutil from {tmp_path / 'psutil.py'}"


def test_a_copy_of_shoal_is_the_same_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Surroundings.here()
    elsewhere = {"cluster": "/site-packages/cluster"}
    server = dataclasses.replace(mine, path=["/site-packages"])
    assert mine.misfit(server, elsewhere) is None
    other = dataclasses.replace(server, package="another digest")
    assert mine.misfit(other, elsewhere) == "it has another Shoal"


def test_what_was_imported_and_has_changed_is_imported_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "changing.py"
    module.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with kept("changing", FORKED) as (agent, address):
        assert asyncio.run(run_and_close(forks_at(address), tmp_path / "first"))[1]["value"] == 1
        pid = agent.facts()["pid"]
        module.write_text("VALUE = 'two'\n")
        assert asyncio.run(run_and_close(forks_at(address), tmp_path / "second"))[1]["value"] == "two"
        assert agent.facts()["pid"] == pid, "it is the same process"


def test_a_fork_server_that_does_not_move_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "_SILENCE_S", 0.3)
    monkeypatch.setattr(node_agent, "_ASK_EVERY_S", 0.1)
    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        stopped = agent.facts()["pid"]
        os.kill(stopped, signal.SIGSTOP)
        assert asyncio.run(run_and_close(forks_at(address), tmp_path / "told"))[0].code == 0
        assert agent.facts()["pid"] != stopped
        assert has_ended(stopped)


def test_processes_that_are_given_up_leave_the_nodes_fork_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def go(agent: NodeAgent, address: str) -> None:
        forks = forks_at(address)
        run = asyncio.create_task(forks.run("one", f"{FORKED}:tell", {"path": str(tmp_path / "no")}))
        assert not (await asyncio.wait([run], timeout=0.5))[0]
        await forks.give_up("another")
        assert not (await asyncio.wait([run], timeout=0.2))[0]
        await forks.give_up("one")
        with pytest.raises(ConnectionError, match="fork server"):
            await asyncio.wait_for(run, 10)
        assert refusal(capfd.readouterr().out) == "it does not answer"
        assert (await run_one(forks, tmp_path / "told"))[0].code == 0, "by one of its own"
        assert not (tmp_path / "no").exists()
        await forks.close()

    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        os.kill(agent.facts()["pid"], signal.SIGSTOP)
        asyncio.run(go(agent, address))


def test_where_nobody_keeps_one_an_owner_has_its_own(tmp_path: Path) -> None:
    forks = ForkedProcesses([FORKED], f"\0nobody-{secrets.token_hex(8)}")
    assert asyncio.run(run_and_close(forks, tmp_path / "told"))[0].code == 0


def test_of_two_agents_on_a_machine_one_stands_by() -> None:
    with kept() as (first, address):
        until(lambda: first.facts()["ready_s"])
        second = NodeAgent(address, [FORKED])
        assert second.facts() == {"pid": None, "ready_s": None}
        first.stop()
        until(lambda: second.facts()["ready_s"])
        second.stop()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_not_answered() -> None:
    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(address)
                stranger.settimeout(10)
                os._exit(0 if stranger.recv(1) == b"" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_modules_that_all_processes_need_are_those_of_both_tenants() -> None:
    modules = modules_of_processes()
    assert "train_jobs.rank.process" in modules


def test_memory_that_processes_share_is_counted_once() -> None:
    pids = []
    whole = memory_of([os.getpid()])
    for _ in range(2):
        child = os.fork()
        if child == 0:
            time.sleep(60)
        pids.append(child)
    try:
        assert memory_of([os.getpid(), *pids]) < 1.5 * whole
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_some_processes_have_a_server_that_imports_more() -> None:
    everybodys, vllms = modules_of_processes(), modules_of_processes("vllm")
    assert {"serve_apps.replica.engine_process", "train_jobs.rank.process"} <= set(everybodys) < set(vllms)
    assert set(vllms) - set(everybodys) == {"serve_apps.engine.vllm_preload"}
    assert modules_of_processes("of nobody") == everybodys


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_python_runs_at_its_start_is_run_where_a_process_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a server that has imported none, or another one."""
    server = Surroundings.here()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Surroundings.here().misfit(server, {}) is None
    own = tmp_path / f"{name}.py"
    own.write_text("")
    for imported in ({}, {name: "/elsewhere/site.py"}):
        assert Surroundings.here().misfit(server, imported) == f"it has {name} from {own}"
    assert Surroundings.here().misfit(server, {name: str(own)}) is None


@pytest.mark.parametrize("kept_one", [True, False])
def test_a_path_among_the_variables_of_a_fork_is_looked_at_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kept_one: bool
) -> None:
    (tmp_path / "of_a_job.py").write_text(f"from {FORKED} import tell\n")
    variables = {"PYTHONPATH": str(tmp_path)}

    async def go(address: str | None) -> None:
        forks = ForkedProcesses((), address, variables=variables)
        end = await forks.run("one", "of_a_job:tell", {"path": str(tmp_path / "told")})
        assert end.code == 0
        assert refusal(capfd.readouterr().out) is None
        await forks.close()

    with kept() as (agent, address):
        until(lambda: agent.facts()["ready_s"])
        asyncio.run(go(address if kept_one else None))
    assert told(tmp_path / "told")["path"][0] == str(tmp_path)
