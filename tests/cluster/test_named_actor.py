"""Who is called by a name is looked up again when it has ended for good."""

from __future__ import annotations

import json

from tests.clusters import LiveCluster

ENDED_FOR_GOOD = """
import asyncio, json, threading, time, ray
from cluster.connection import connect, read_record
from cluster.named_actor import NamedActor, NoActorError
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
    counter = Counter.options(name="counter", namespace="shoal", lifetime="detached").remote(first)
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


def test_a_caller_goes_on_with_whoever_has_the_name_now(running_cluster: LiveCluster) -> None:
    name = repr(running_cluster.record.name)
    done = running_cluster.python(ENDED_FOR_GOOD.replace("NAME)", f"{name})"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
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
