"""The broker of a real cluster: its place, its promises, and what it remembers after a SIGKILL."""

from __future__ import annotations

import json
import re

import pytest

from cluster.errors import ShoalError
from cluster.sharing.audit import granted_twice
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand
from cluster.sharing.journal import journal_storage, read_events
from cluster.state.health import wait_until
from tests.clusters import LiveCluster

BEGIN = """
import json, logging, os, signal, sys
import ray
ray.init(namespace="shoal", log_to_driver=False, logging_level=logging.ERROR)
from cluster.errors import ShoalError
from cluster.sharing import client as module
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand

def demand(holder, least, most, held=(), kind="training"):
    return Demand(holder, kind, {"CPU": 1}, least, most, tuple(held))

def told(call):
    try:
        call()
    except ShoalError as error:
        return str(error)

broker = BrokerClient()
"""


def answer_of(cluster: LiveCluster, program: str) -> dict:
    done = cluster.python(BEGIN + program, timeout_s=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_leases_of_a_live_cluster(running_cluster: LiveCluster):
    told = answer_of(
        running_cluster,
        """
answer = {"info": broker.info()}
workers = {row["NodeID"]: row["Resources"].get("CPU", 0) for row in ray.nodes() if row["Alive"]}
answer["cpus"] = sorted(workers.values())
first = broker.wait(demand("broker-test/a", 3, 3), timeout_s=10)
answer["granted"] = [workers[node] for node in first.nodes]
answer["other"] = broker.request(demand("broker-test/b", 2, 2, kind="serving")).units
answer["too late"] = told(lambda: broker.wait(demand("broker-test/b", 2, 2, kind="serving"), timeout_s=0.5))
waits = []
broker.wait(demand("broker-test/b", 2, 2, kind="serving"), 5, lambda: bool(waits), on_wait=waits.append)
answer["waits"] = waits[0]
broker.release("broker-test/b")
answer["stopped"] = broker.wait(demand("broker-test/c", 2, 2), timeout_s=None, stop=lambda: True).units
broker.release("broker-test/c")
answer["kept"] = told(lambda: broker.wait(demand("broker-test/a", 5, 5, held=first.nodes), timeout_s=0.1))
answer["leases"] = [row["holder"] for row in broker.leases()]
broker.release("broker-test/a")
answer["after"] = broker.wait(demand("broker-test/b", 2, 2, kind="serving"), timeout_s=10).units
broker.release("broker-test/b")
module.BROKER_NAME = "nobody"
answer["no broker"] = told(BrokerClient)
print(json.dumps(answer))
""",
    )
    assert told["info"]["name"] == running_cluster.record.name
    assert told["cpus"] == [0, 2, 2]
    assert told["granted"] == [2, 2, 2]
    assert told["other"] == 0
    assert told["too late"].startswith("broker-test/b: no room for 2 replicas of 1 CPU each within 0.5 s")
    assert re.search(r"worker-\d has 0 CPU free \(a holds 2\)", told["too late"])
    assert told["waits"] == told["too late"].partition("0.5 s: ")[2]
    assert "no room for 5 workers" in told["kept"]
    assert told["stopped"] == 0
    assert told["leases"] == ["broker-test/a"]
    assert told["after"] == 2
    assert "is the cluster up?" in told["no broker"]


def test_a_killed_broker_is_rebuilt_from_what_runs_and_lets_nobody_in_before(running_cluster: LiveCluster):
    (killed,) = running_cluster.processes("ray::Broker")
    told = answer_of(
        running_cluster,
        f"""
first = broker.request(demand("broker-test/a", 2, 3))
os.kill({killed.pid}, signal.SIGKILL)
again = broker.request(demand("broker-test/a", 2, 3, held=first.nodes))
newcomer = broker.request(demand("broker-test/b", 1, 1))
later = broker.wait(demand("broker-test/b", 1, 1), timeout_s=20)
crowd = broker.request(demand("broker-test/c", 1, 1))
kept = broker.request(demand("broker-test/a", 2, 3, held=first.nodes))
for holder in "abc":
    broker.release(f"broker-test/{{holder}}")
nodes = {{row["NodeID"]: row["NodeManagerAddress"] for row in ray.nodes()}}
print(json.dumps({{
    "first": first.nodes, "again": again.nodes, "kept": kept.nodes, "newcomer": newcomer.units,
    "later": later.units, "crowd": crowd.units, "info": broker.info()["name"],
}}))
""",
    )
    assert len(told["first"]) == 3
    assert told["again"] == told["first"]
    assert told["newcomer"] == 0, "granted before those who run could be heard"
    assert told["later"] == 1
    assert told["crowd"] == 0, "granted before the one that must give way is gone"
    assert len(told["kept"]) == 2
    assert set(told["kept"]) <= set(told["first"])
    assert told["info"] == running_cluster.record.name


def test_what_happened_is_in_the_log_of_the_storage_and_shows_no_device_granted_twice(
    running_cluster: LiveCluster,
):
    told = answer_of(
        running_cluster,
        """
place = [(line["epoch"], line["seq"]) for line in broker.events()][-1]
first = broker.wait(demand("broker-test/log", 1, 2), timeout_s=10)
broker.request(demand("broker-test/log", 1, 2, held=first.nodes))
broker.release("broker-test/log")
print(json.dumps({"events": broker.events(place), "nodes": len(set(first.nodes))}))
""",
    )
    events = told["events"]
    assert [(event["cause"], event["holder"]) for event in events] == [
        (cause, "broker-test/log") for cause in ("started", "held", "released")
    ]
    assert sum(events[0]["after"].values()) == sum(events[1]["held"].values()) == 2
    assert set(events[0]["after"]) <= {"worker-1", "worker-2"}
    storage = journal_storage(running_cluster.record.storage, running_cluster.record.name)
    assert wait_until(lambda: events[-1] in read_events(storage), timeout_s=10)
    written = read_events(storage)
    assert [event["seq"] for event in written] == list(range(1, len(written) + 1))
    assert granted_twice(written) == []


@pytest.mark.slow
def test_a_broker_that_stood_still_takes_nothing_from_those_who_ran_on(running_cluster: LiveCluster):
    (broker,) = running_cluster.processes("ray::Broker")
    told = answer_of(
        running_cluster,
        f"""
import threading, time
from cluster.sharing.ledger import TTL_S
place = [(line["epoch"], line["seq"]) for line in broker.events()][-1]
first = broker.wait(demand("broker-test/a", 3, 3), timeout_s=10)
mine = demand("broker-test/a", 3, 3, held=first.nodes)
broker.request(mine)
os.kill({broker.pid}, signal.SIGSTOP)
began = time.monotonic()
# Another's call is the first that it answers, and it waits for that longer than a lease lasts.
other = threading.Thread(target=told, args=[lambda: BrokerClient().wait(demand("broker-test/b", 1, 1), 1)])
other.start()
silent = told(lambda: broker.request(mine))
waited = time.monotonic() - began
time.sleep(TTL_S + 3 - waited)
os.kill({broker.pid}, signal.SIGCONT)
other.join()
again = broker.request(mine)
for holder in "ab":
    broker.release(f"broker-test/{{holder}}")
causes = [(line["cause"], line.get("holder")) for line in broker.events(place)]
print(json.dumps({{
    "first": first.nodes, "again": again.nodes, "silent": silent, "waited": waited, "causes": causes,
}}))
""",
    )
    assert "did not answer within 5 s" in told["silent"]
    assert told["waited"] < 8, "a lease is renewed before it could be lost"
    assert told["again"] == told["first"]
    assert ["expired", "broker-test/a"] not in told["causes"]
    storage = journal_storage(running_cluster.record.storage, running_cluster.record.name)
    assert granted_twice(read_events(storage)) == []


@pytest.mark.slow
def test_what_a_stranger_uses_is_seen_and_not_granted(running_cluster: LiveCluster):
    told = answer_of(
        running_cluster,
        """
import time
@ray.remote(num_cpus=1)
class Stranger:
    def node(self):
        return ray.get_runtime_context().get_node_id()
stranger = Stranger.remote()
node = ray.get(stranger.node.remote())
mine = demand("broker-test/a", 4, 4)
deadline = time.monotonic() + 30
while broker.foreign() != {node: {"CPU": 1.0}} and time.monotonic() < deadline:
    time.sleep(0.2)
answer = {"node": node, "foreign": broker.foreign(), "granted": broker.request(mine).units}
answer["why"] = broker.explain("broker-test/a")["text"]
ray.kill(stranger)
answer["after"] = broker.wait(mine, timeout_s=20).units
answer["gone"] = broker.foreign()
broker.release("broker-test/a")
print(json.dumps(answer))
""",
    )
    names = {node.node_id: node.name for node in running_cluster.record.nodes}
    assert told["foreign"] == {told["node"]: {"CPU": 1}}
    assert told["granted"] == 0
    assert f"{names[told['node']]} has 1 CPU free (strangers use 1 CPU)" in told["why"]
    assert told["after"] == 4
    assert told["gone"] == {}


def test_who_watches_hears_of_another_grant_at_once_and_of_nothing_else(running_cluster: LiveCluster):
    told = answer_of(
        running_cluster,
        """
import time
holder, other = "broker-test/watcher", "broker-test/other"
total = int(sum(row["Resources"].get("CPU", 0) for row in ray.nodes() if row["Alive"]))
grant = broker.wait(demand(holder, 1, total), timeout_s=10)
held = grant.nodes
broker.request(demand(holder, 1, total, held))

def watched(known, hold_s, meanwhile=lambda: None):
    began = time.monotonic()
    call = broker.watch({holder: known}, hold_s)
    meanwhile()
    news = ray.get(call, timeout=30)
    return news, time.monotonic() - began

answer = {"nothing": watched(grant, 1.0)}
rival = lambda: broker.request(demand(other, 1, 1, kind="serving"))
answer["taken"] = watched(grant, 10.0, rival)
now = broker.request(demand(holder, 1, total, held))
answer["fewer"] = len(held) - len(now.nodes)
answer["known"] = watched(now, 0.3)[0]
kept = broker.request(demand(other, 1, 1, kind="serving"))
answer["coming"] = [len(kept.nodes), len(kept.coming)]
leave = lambda: broker.request(demand(holder, 1, total, now.nodes))
began = time.monotonic()
call = broker.watch({other: kept}, 10.0)
leave()
answer["free"] = [ray.get(call, timeout=30), time.monotonic() - began]
answer["granted"] = len(broker.request(demand(other, 1, 1, kind="serving")).nodes)
for each in (holder, other):
    broker.release(each)
print(json.dumps(answer))
""",
    )
    news, seconds = told["nothing"]
    assert not news
    assert 0.9 < seconds < 3.0
    news, seconds = told["taken"]
    assert news
    assert seconds < 2.0
    assert (told["fewer"], told["known"], told["coming"]) == (1, False, [0, 1])
    news, seconds = told["free"]
    assert news
    assert seconds < 2.0
    assert told["granted"] == 1


def test_the_broker_lives_on_the_head(running_cluster: LiveCluster):
    told = answer_of(
        running_cluster,
        """
from ray.util.state import list_actors
actors = list_actors(filters=[("name", "=", "shoal-broker"), ("state", "=", "ALIVE")])
nodes = {row["NodeID"]: row["NodeManagerAddress"] for row in ray.nodes()}
print(json.dumps({"addresses": [nodes[actor.node_id] for actor in actors]}))
""",
    )
    assert told["addresses"] == [running_cluster.record.head_ip]


def test_nothing_is_granted_on_a_node_that_does_not_fit(running_cluster: LiveCluster):
    odd = running_cluster.record.nodes[1]
    told = answer_of(
        running_cluster,
        f"""
broker.judge({{{odd.node_id!r}: ["its storage is another"]}})
answer = {{"misfits": broker.misfits(), "granted": broker.request(demand("broker-test/a", 1, 4)).nodes}}
answer["alive"] = broker.alive()
broker.judge({{{odd.node_id!r}: []}})
answer["alive later"] = broker.alive()
answer["after"] = broker.wait(demand("broker-test/a", 4, 4, held=answer["granted"]), timeout_s=20).units
answer["none"] = broker.misfits()
broker.release("broker-test/a")
print(json.dumps(answer))
""",
    )
    assert told["misfits"] == {odd.node_id: ["its storage is another"]}
    assert len(told["granted"]) == 2
    assert odd.node_id not in told["granted"]
    assert told["after"] == 4
    assert told["none"] == {}
    nodes = {node.node_id for node in running_cluster.record.nodes}
    assert told["alive"] == {node: node != odd.node_id for node in nodes}
    assert told["alive later"] == dict.fromkeys(nodes, True)


def test_without_a_cluster_there_is_a_sentence():
    with pytest.raises(ShoalError, match=r"no broker.*is the cluster up\?"):
        BrokerClient().request(Demand("a", "training", {"CPU": 1}, 1, 1))


@pytest.mark.slow
def test_nothing_is_granted_on_a_node_that_does_not_answer_though_ray_thinks_it_alive(
    running_cluster: LiveCluster,
):
    frozen = running_cluster.record.nodes[1]
    raylet = running_cluster.raylet(frozen.name)
    raylet.suspend()
    try:
        told = answer_of(
            running_cluster,
            f"""
nodes = [row["NodeID"] for row in ray.nodes() if row["Resources"].get("CPU")]
answer = {{"gone": broker.suspect(nodes), "unknown": broker.suspect(["no such node"])}}
answer["granted"] = broker.request(demand("broker-test/a", 1, 4)).nodes
os.kill({raylet.pid}, signal.SIGCONT)
answer["back"] = broker.wait(demand("broker-test/a", 4, 4, held=answer["granted"]), timeout_s=20).units
broker.release("broker-test/a")
print(json.dumps(answer))
""",
        )
    finally:
        raylet.resume()
    assert told["gone"] == [frozen.node_id]
    assert told["unknown"] == ["no such node"]
    assert len(told["granted"]) == 2
    assert frozen.node_id not in told["granted"]
    assert told["back"] == 4
