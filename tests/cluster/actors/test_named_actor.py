"""Who is called by a name is looked up again when it has ended for good."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.actors import named_actor
from cluster.actors.named_actor import NamedActor, NoActorError
from tests.clusters import LiveCluster

ENDED_FOR_GOOD = """
import asyncio, json, threading, time, ray
from cluster.state.connection import connect, read_record
from cluster.actors.named_actor import NamedActor, NoActorError
from cluster.sharing.broker import BROKER_NAME, start_broker
from cluster.sharing.client import BrokerClient

connect(read_record(NAME))

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Counter:
    def __init__(self, first):
        self.at = first
    def add(self, number=1):
        self.at += number
        return self.at
    def fail(self):
        ray.get(ray.get_actor("nobody"))
    def sleep(self):
        time.sleep(60)

def start(first):
    until = time.monotonic() + 20
    while True:
        try:
            counter = Counter.options(name="counter", namespace="shoal", lifetime="detached").remote(first)
            break
        except ValueError:  # the one before is just ending
            assert time.monotonic() < until
            threading.Event().wait(0.05)
    ray.get(counter.add.remote(0))
    return counter

def refused(what):
    try:
        what()
    except Exception as error:
        return type(error).__name__
    return None

found = {}
named = NamedActor("counter")
found["before it is there"] = refused(lambda: named.call("add", timeout_s=5))
first = start(0)
found["there"] = named.call("add", timeout_s=30)
found["its own error"] = refused(lambda: named.call("fail", timeout_s=30))
began = time.monotonic()
found["late"] = refused(lambda: named.call("sleep", timeout_s=0.5)), time.monotonic() - began < 5
ray.kill(first)
began = time.monotonic()
found["nobody has the name"] = refused(lambda: named.call("add", timeout_s=30))
found["within seconds"] = time.monotonic() - began < 10
found["and then"] = refused(lambda: named.call("add", timeout_s=30))
second = start(100)
found["another"] = named.call("add", timeout_s=30)
ray.kill(second)
third = start(200)
found["another at once"] = named.call("add", timeout_s=30, named={"number": 2})
ray.kill(third)
fourth = start(300)
found["once"] = refused(lambda: named.call("add", timeout_s=30, once=True))
found["once more"] = named.call("add", timeout_s=30, once=True)

async def ask():
    other = NamedActor("counter")
    found["asked"] = await other.ask("add", timeout_s=30)
    ray.kill(fourth)
    fifth = start(400)
    found["asked another"] = await other.ask("add", timeout_s=30)
    ray.kill(fifth)
    while refused(lambda: ray.get(fifth.add.remote(0))) is None:
        await asyncio.sleep(0.05)  # a kill is no more than a wish until it is carried out
    found["asked nobody"] = False
    try:
        await other.ask("add", timeout_s=30)
    except (NoActorError, ray.exceptions.RayError):
        found["asked nobody"] = True
    other.tell("add")

asyncio.run(ask())

broker = BrokerClient()
info = broker.info()
ray.kill(ray.get_actor(BROKER_NAME, namespace="shoal"))
start_broker(info)
found["broker"] = broker.info() == info
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_caller_goes_on_with_whoever_has_the_name_now(running_cluster: LiveCluster) -> None:
    name = repr(running_cluster.record.name)
    done = running_cluster.python(ENDED_FOR_GOOD.replace("NAME)", f"{name})"))
    assert done.returncode == 0, done.stderr
    # Ray may say something of its own beside it.
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found.pop("its own error") is not None
    assert found.pop("nobody has the name") in ("ActorDiedError", "NoActorError")
    assert found.pop("once") == "ActorDiedError"
    assert found == {
        "before it is there": "NoActorError",
        "there": 1,
        "late": ["GetTimeoutError", True],
        "within seconds": True,
        "and then": "NoActorError",
        "another": 101,
        "another at once": 202,
        "once more": 301,
        "asked": 302,
        "asked another": 401,
        "asked nobody": True,
        "broker": True,
    }


class Actor:
    """One that had, or has, a name; its only method answers with what it was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(
            options=lambda max_task_retries: SimpleNamespace(remote=self._remote), remote=self._remote
        )

    def _remote(self, word: str) -> Any:
        return self, word


class World:
    """A cluster on which the name of an actor that has died leads to it for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: list[Actor] = []
        self.looks = 0
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_actor", self._get_actor)
        monkeypatch.setattr(ray, "get", self._get)

    def _get_actor(self, name: str, namespace: str) -> Actor:
        self.looks += 1
        if not self.there:
            raise ValueError(f"no {name} in {namespace}")
        first = self.there[0]
        if first.dead and self.looks % 3 == 0:  # the news comes late
            self.there.pop(0)
        return first

    def _get(self, reference: tuple[Actor, str], timeout: float | None) -> str:
        actor, word = reference
        if actor.dead:
            raise ray.exceptions.ActorDiedError()
        return f"{actor.name} {word}"


def test_one_who_has_died_is_called_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world, named = World(monkeypatch), NamedActor("someone")
    with pytest.raises(NoActorError, match="no actor is called someone"):
        named.call("say", "a", timeout_s=5)
    first, second = Actor("first"), Actor("second")
    world.there = [first]
    assert [named.call("say", word, timeout_s=5) for word in "ab"] == ["first a", "first b"]
    looks = world.looks
    assert named.call("say", "c", timeout_s=5) == "first c"
    assert world.looks == looks, "who is there is not looked up again"
    first.dead, world.there = True, [first, second]
    assert named.call("say", "d", timeout_s=5) == "second d"


def test_what_may_be_done_once_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, named = World(monkeypatch), NamedActor("someone")
    first, second = Actor("first"), Actor("second")
    world.there = [first]
    named.call("say", "a", timeout_s=5)
    first.dead, world.there = True, [second]
    with pytest.raises(ray.exceptions.ActorDiedError):
        named.call("say", "b", timeout_s=5, once=True)
    assert named.call("say", "c", timeout_s=5, once=True) == "second c"


def test_nobody_waits_long_for_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_actor, "NOTICE_S", 0.2)
    world, named = World(monkeypatch), NamedActor("someone")
    first = Actor("first")
    world.there = [first]
    named.find()
    first.dead = True
    began = time.monotonic()
    with pytest.raises(ray.exceptions.ActorDiedError):
        named.call("say", "a", timeout_s=None)
    assert time.monotonic() - began < 2
