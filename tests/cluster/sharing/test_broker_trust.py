"""What the broker makes of failures that speak against a node; Ray's list of nodes is a stand-in."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from cluster.files.storage import Storage
from cluster.sharing import broker as module
from cluster.sharing.broker import Broker
from cluster.sharing.demand import Demand
from cluster.sharing.events import Event
from cluster.sharing.journal import EVENTS, KEPT, TRUST, journal_storage, read_events
from cluster.sharing.node_health import FIRST_S

FACTS = {"name": "c", "head_ip": "192.0.2.9", "avoid_after": 2}


class StandIn:
    """What the broker asks of Ray: two nodes of two CPUs that are named, and alive unless said."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.draining: set[str] = set()
        self.restarted = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": f"id{index}",
                "Alive": f"id{index}" not in self.dead,
                "Resources": {"CPU": 2.0},
                "Labels": {"shoal.io/node": f"worker-{index}"},
                "NodeManagerAddress": f"127.0.0.{index}",
                "NodeManagerPort": 1,
            }
            for index in (1, 2)
        ]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(module, "ray", stand_in)
    monkeypatch.setattr(module, "draining_nodes", lambda: stand_in.draining)
    monkeypatch.setattr(module, "available_resources_by_node", dict)
    monkeypatch.setattr(module, "was_restarted", lambda: stand_in.restarted)
    return stand_in


class Clock:
    now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def start(ray: StandIn, clock: Clock, tmp_path: Path) -> Callable[[], Broker]:
    return lambda: Broker(FACTS | {"storage": str(tmp_path)})


def job(held: tuple[str, ...] = ()) -> Demand:
    return Demand("job/a", "training", {"CPU": 1}, 2, 2, held)


def blame_twice(broker: Broker, clock: Clock, steps: tuple[int, int] = (5, 9)) -> None:
    for step in steps:
        clock.now += 60
        broker.blame("id1", "job/a", "worker", step, True)


def test_a_job_that_failed_twice_on_a_node_is_granted_another(
    start: Callable[[], Broker], clock: Clock
) -> None:
    broker = start()
    first = broker.request(job())
    broker.request(job(first.nodes))
    assert first.nodes == ("id1", "id1")
    blame_twice(broker, clock)
    assert broker.request(job(first.nodes)).nodes == first.nodes
    assert broker.request(job()).nodes == ("id2", "id2")
    (verdict,) = broker.avoided().values()
    assert list(broker.avoided()) == ["id1"]
    assert verdict["reason"] == "2 failures of job/a within 1 minute"


def test_it_is_remembered_over_the_brokers_death_and_written_down(
    start: Callable[[], Broker], ray: StandIn, clock: Clock, tmp_path: Path
) -> None:
    broker = start()
    blame_twice(broker, clock)
    before = broker.avoided()
    broker.leases()
    assert broker._journal.flushed()
    causes = [event["cause"] for event in read_events(journal_storage(str(tmp_path), "c"))]
    assert causes.count("node_blamed") == 2
    assert causes.count("node_avoided") == 1
    ray.restarted = True
    assert start().avoided() == before != {}
    ray.restarted = False
    assert start().avoided() == {}, "a cluster that is started begins without"


def test_a_node_is_forgiven_by_its_id_and_for_good(
    start: Callable[[], Broker], ray: StandIn, clock: Clock
) -> None:
    broker = start()
    blame_twice(broker, clock)
    clock.now += 60
    assert broker.forgive("id1")
    assert not broker.forgive("id1")
    assert not broker.forgive("nobody")
    assert broker.avoided() == {}
    assert broker._journal.flushed()
    ray.restarted = True
    assert start().avoided() == {}


def test_the_loss_of_a_node_that_was_drained_speaks_against_nobody(
    start: Callable[[], Broker], ray: StandIn, clock: Clock
) -> None:
    for drained in (True, False):
        broker = start()
        ray.draining = {"id1"} if drained else set()
        clock.now += 60
        broker.leases()
        ray.draining, ray.dead = set(), {"id1"}
        broker.blame("id1", "job/a", "node", 5, False)
        said = [event["cause"] for event in broker.events(None, 100)]
        assert ("node_blamed" in said) is not drained
        ray.dead = set()


@pytest.fixture(params=["directory", "object store"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Where the broker's logs are."""
    if request.param == "directory":
        return journal_storage(str(tmp_path), "c")
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    storage = Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)
    monkeypatch.setattr(module, "journal_storage", lambda location, cluster: storage)
    return storage


def happen(broker: Broker, number: int) -> None:
    """Have other things happen, and all of it written."""
    event = Event("held", "of job/a, a worker runs " + "on " * 100, "job/a", "training", {"CPU": 1})
    broker._journal.add([event] * number)
    assert broker._journal.flushed(60.0)


def test_it_is_remembered_whatever_else_has_happened_since_until_its_time_is_over(
    start: Callable[[], Broker], ray: StandIn, clock: Clock, kept: Storage
) -> None:
    broker = start()
    blame_twice(broker, clock)
    happen(broker, KEPT + 100)
    clock.now += FIRST_S
    blame_twice(broker, clock, steps=(20, 30))
    happen(broker, KEPT + 100)
    before = broker.avoided()
    assert before["id1"]["times"] == 2
    ray.restarted = True
    for _ in range(2):
        again = start()
        assert again.avoided() == before, "how often it was, too"
        happen(again, KEPT + 100)
    assert len(again.events(None, KEPT)) == KEPT
    clock.now += 2 * FIRST_S
    assert start().avoided() == {}
    assert len(read_events(kept)) > 4 * KEPT


def test_a_restart_remembers_nothing_of_the_cluster_before_this_one(
    start: Callable[[], Broker], ray: StandIn, clock: Clock, kept: Storage
) -> None:
    broker = start()
    blame_twice(broker, clock)
    assert broker.avoided() != {}
    assert broker._journal.flushed(60.0)
    happen(start(), 1)
    ray.restarted = True
    assert start().avoided() == {}


def test_a_broker_starts_over_logs_that_cannot_be_read(
    start: Callable[[], Broker], ray: StandIn, tmp_path: Path
) -> None:
    for log in (EVENTS, TRUST):
        (tmp_path / "sharing" / "c" / f"{log}.jsonl").mkdir(parents=True)
    ray.restarted = True
    assert start().avoided() == {}
