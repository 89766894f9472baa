"""Which replica a request gets from Serve's router, with its own code and without a cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from serve_apps.routing import active, ongoing
from serve_apps.routing.active import tell_active
from serve_apps.routing.ongoing import LOOK_EVERY_S
from serve_apps.routing.serve_router import PolicyRouter
from serve_apps.routing.spread import Spread

DEPLOYMENT = DeploymentID("replica", "chat:1")
PLACES = 4
"""Of each replica."""


class Replicas:
    """Some replicas of a deployment, with so many places each."""

    def __init__(self, number: int) -> None:
        self.ids = [ReplicaID(f"replica-{i}", DEPLOYMENT) for i in range(number)]
        self.busy = dict.fromkeys(self.ids, 0)
        self.asked = 0
        """How often any was asked for its queue, or refused a request."""
        self.router = self.gateway()

    def gateway(self, application: str = "") -> PolicyRouter:
        """The router that one more gateway has."""
        router = PolicyRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True, max_backoff_s=0.01
        )
        router.initialize_state("least_connections", "chat", application)
        router.update_replicas([self._replica(each) for each in self.ids])
        return router

    def add(self, name: str) -> None:
        """Serve has started one more, which the first gateway hears of."""
        self.ids.append(ReplicaID(name, DEPLOYMENT))
        self.busy[self.ids[-1]] = 0
        self.router.update_replicas([self._replica(each) for each in self.ids])

    def _replica(self, replica_id: ReplicaID) -> Any:
        async def length(*, deadline_s: float) -> int:
            self.asked += 1
            await asyncio.sleep(0.001)
            return self.busy[replica_id]

        return SimpleNamespace(
            replica_id=replica_id,
            actor_id=replica_id.unique_id,
            max_ongoing_requests=PLACES,
            get_queue_len=length,
            is_cross_language=False,
        )

    async def send(self, name: str, router: PolicyRouter | None = None, **fields: Any) -> str:
        """Give a request to a replica, as Serve's handles do; its name."""
        router = router or self.router
        metadata = RequestMetadata(request_id=name, internal_request_id=name)
        pending = PendingRequest(args=[{"prompt": "a", **fields}], kwargs={}, metadata=metadata)
        again = False
        while True:
            found = (await router._choose_replica_for_request(pending, is_retry=again)).replica_id
            router.on_send_request(found)
            try:
                await asyncio.sleep(0.001)  # on its way
            except asyncio.CancelledError:
                router.on_request_completed(found, name)
                raise
            again = self.busy[found] >= PLACES  # then it refuses
            self.asked += again
            self.busy[found] += not again
            router.on_new_queue_len_info(found, self.busy[found])
            if not again:
                router.on_request_routed(pending, found, None)  # type: ignore[arg-type]
                return str(found.unique_id)
            router.on_request_completed(found, name)

    def end(self, name: str, replica: str, router: PolicyRouter | None = None) -> None:
        """The replica has answered the request."""
        router = router or self.router
        replica_id = ReplicaID(replica, DEPLOYMENT)
        self.busy[replica_id] -= 1
        router.on_request_completed(replica_id, name)
        router.decrement_queue_len_cache(replica_id)


def run(number: int, go: Callable[[Replicas], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(10):
            await go(Replicas(number))

    asyncio.run(all_of_it())


def test_requests_on_their_own_go_to_all_replicas() -> None:
    async def go(replicas: Replicas) -> None:
        took = await asyncio.gather(*(replicas.send(f"r-{i}") for i in range(8 * PLACES)))
        assert sorted(took) == sorted(f"replica-{i}" for i in range(8) for _ in range(PLACES))

    run(8, go)


def test_the_parts_of_one_go_to_two_replicas_and_hold_up_nobody_else() -> None:
    async def go(replicas: Replicas) -> None:
        spread = Spread(most=2)
        parts = [asyncio.create_task(replicas.send(f"part-{i}", **spread.part(i))) for i in range(4 * PLACES)]
        # Those that have no place wait before these in every queue of the router.
        others = await asyncio.gather(*(replicas.send(f"other-{i}") for i in range(4 * PLACES)))
        took = {f"part-{i}": part.result() for i, part in enumerate(parts) if part.done()}
        assert len(took) == 2 * PLACES
        assert len(set(took.values())) == 2
        assert set(others).isdisjoint(took.values())
        while not all(part.done() for part in parts):
            for name, replica in took.items():
                spread.left(int(name.removeprefix("part-")))
                replicas.end(name, replica)
            before = set(took)
            await asyncio.sleep(0.05)
            took = {f"part-{i}": part.result() for i, part in enumerate(parts) if part.done()}
            took = {name: replica for name, replica in took.items() if name not in before}
            assert len(set(took.values())) <= 2
        spread.close()

    run(8, go)


def test_after_one_has_broken_the_rest_goes_to_one_other_alone_and_to_none_after_two() -> None:
    async def go(replicas: Replicas) -> None:
        spread = Spread(most=2)
        first, second = [await replicas.send(f"{i}", **spread.part(i)) for i in range(2)]
        assert first != second
        for number, broken in enumerate((first, second)):
            replicas.router.on_replica_actor_died(ReplicaID(broken, DEPLOYMENT))
            spread.left(number, broke=True)
            again = asyncio.create_task(replicas.send(f"again {number}", **spread.part(number)))
            if broken == first:
                assert await again == second
        await replicas.send("another's")
        assert not again.done()
        spread.close()
        await replicas.send("yet another's")
        assert not again.done(), "nobody waits for it any more"
        again.cancel()

    run(8, go)


def test_one_that_its_replica_refuses_may_go_elsewhere() -> None:
    spread = Spread(most=2)
    spread.taken(0, "a")
    spread.taken(1, "b")
    assert [spread.may_take(1, replica) for replica in "abc"] == [True, True, True]
    spread.taken(1, "c")
    assert [spread.may_take(2, replica) for replica in "abc"] == [True, False, True]
    spread.taken(2, "c")
    assert [spread.may_take(1, replica) for replica in "abc"] == [True, False, True]
    spread.close()


async def fill(replicas: Replicas, router: PolicyRouter | None = None) -> dict[str, str]:
    """Fill all places; by request, its replica."""
    names = [f"first-{i}" for i in range(len(replicas.ids) * PLACES)]
    return dict(zip(names, await asyncio.gather(*(replicas.send(n, router) for n in names)), strict=True))


def test_full_replicas_are_not_asked_and_a_free_place_is_taken_at_once_by_who_waited_longest() -> None:
    async def go(replicas: Replicas) -> None:
        took = await fill(replicas)
        waiting = [asyncio.create_task(replicas.send(f"next-{i}")) for i in range(40)]
        await asyncio.sleep(0.1)  # what they do at first is over
        replicas.asked = 0
        await asyncio.sleep(0.5)
        assert replicas.asked == 0
        for number, (name, replica) in enumerate(took.items()):
            replicas.end(name, replica)
            async with asyncio.timeout(LOOK_EVERY_S / 2):
                assert await waiting[number] == replica
        assert not any(each.done() for each in waiting[len(took) :])
        assert replicas.asked == 0
        for each in waiting[len(took) :]:
            each.cancel()

    run(8, go)


def test_places_that_become_free_together_are_each_given_once() -> None:
    async def go(replicas: Replicas) -> None:
        took = await fill(replicas)
        waiting = [asyncio.create_task(replicas.send(f"next-{i}")) for i in range(2 * len(took))]
        await asyncio.sleep(0.1)
        replicas.asked = 0
        for name, replica in took.items():
            replicas.end(name, replica)
        async with asyncio.timeout(0.5):
            assert sorted(await asyncio.gather(*waiting[: len(took)])) == sorted(took.values())
        assert replicas.asked == 0
        for each in waiting:
            each.cancel()

    run(8, go)


def test_a_place_that_was_given_to_one_who_leaves_goes_to_the_next() -> None:
    async def go(replicas: Replicas) -> None:
        (name, replica), *_ = (await fill(replicas)).items()
        for turns in range(12):  # the client leaves at whichever moment between the free place and the send
            leaves = asyncio.create_task(replicas.send(f"leaves-{turns}"))
            stays = asyncio.create_task(replicas.send(f"stays-{turns}"))
            await asyncio.sleep(0.1)
            replicas.end(name, replica)
            for _ in range(turns):
                await asyncio.sleep(0)
            if leaves.done():
                break
            leaves.cancel()
            async with asyncio.timeout(0.5):
                assert await stays == replica
            name = f"stays-{turns}"
        assert turns > 2

    run(1, go)


def test_a_new_replica_is_taken_at_once_and_one_that_becomes_active_too() -> None:
    async def go(replicas: Replicas) -> None:
        await fill(replicas)
        waiting = [asyncio.create_task(replicas.send(f"next-{i}")) for i in range(PLACES)]
        await asyncio.sleep(0.1)
        replicas.add("replica-new")
        async with asyncio.timeout(LOOK_EVERY_S / 2):
            assert {await each for each in waiting} == {"replica-new"}
        tell_active({"only": []})
        router = replicas.gateway("only")
        waits = asyncio.create_task(replicas.send("waits", router))
        await asyncio.sleep(0.1)
        replicas.asked = 0
        await asyncio.to_thread(tell_active, {"only": ["replica-new"], "other": []})
        replicas.busy[replicas.ids[-1]] = 0
        async with asyncio.timeout(LOOK_EVERY_S / 2):
            assert await waits == "replica-new"
        tell_active({})

    run(1, go)


def test_no_gateway_takes_all_places_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(replicas: Replicas) -> None:
        monkeypatch.setattr(active, "_gateways", 2)
        gateways = [replicas.router, replicas.gateway()]
        running = [(gateways[0], name, at) for name, at in (await fill(replicas)).items()]
        served = [0, 0]

        async def client(number: int, which: int) -> None:
            for i in range(1000):
                name = f"{which}-{number}-{i}"
                running.append((gateways[which], name, await replicas.send(name, gateways[which])))
                served[which] += 1

        clients = [asyncio.create_task(client(i, which)) for which in (0, 1) for i in range(20)]
        for _ in range(300):
            gateway, name, at = running.pop(0)
            replicas.end(name, at, gateway)
            await asyncio.sleep(0.01)
        assert sum(served) > 250, "each is taken again soon"
        assert min(served) > 0.25 * sum(served)
        for each in clients:
            each.cancel()

    run(4, go)


def test_a_gateway_without_a_place_gets_its_share_of_those_that_two_others_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many clients each as places: what the two have suffices them, and neither has a pause."""

    async def go(replicas: Replicas) -> None:
        monkeypatch.setattr(active, "_gateways", 3)
        gateways = [replicas.router, replicas.gateway(), replicas.gateway()]
        clients, running = len(replicas.ids) * PLACES // 2, [0, 0, 0]
        waited: list[float] = []

        async def client(which: int, number: int) -> None:
            for i in range(1000):
                name, began = f"{which}-{number}-{i}", asyncio.get_running_loop().time()
                at = await replicas.send(name, gateways[which])
                waited.append(asyncio.get_running_loop().time() - began)
                running[which] += 1
                await asyncio.sleep(random.uniform(0.2, 0.4))
                running[which] -= 1
                replicas.end(name, at, gateways[which])

        tasks = [asyncio.create_task(client(which, i)) for which in (0, 1) for i in range(clients)]
        before = []
        for _ in range(10):
            await asyncio.sleep(0.1)
            before.append(sum(running))
        assert sum(before) > 0.8 * len(before) * 2 * clients
        tasks += [asyncio.create_task(client(2, i)) for i in range(clients)]
        shares = []
        for _ in range(55):
            await asyncio.sleep(0.1)
            shares.append(tuple(running))
        settled = [sum(each[i] for each in shares[15:]) / 40 for i in range(3)]
        assert min(settled) > 0.75 * 2 * clients / 3, settled
        assert sum(settled) > 0.85 * 2 * clients
        assert max(waited) < 1.5
        for each in tasks:
            each.cancel()

    run(2, go)


def test_one_of_two_gateways_that_has_all_requests_leaves_no_place_empty_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go(replicas: Replicas) -> None:
        monkeypatch.setattr(active, "_gateways", 2)
        replicas.gateway()  # has nothing to do
        places, seconds, busy_s = len(replicas.ids) * PLACES, 3.0, 0.0

        async def client(number: int) -> None:
            nonlocal busy_s
            for i in range(10_000):
                at = await replicas.send(f"{number}-{i}")
                began = asyncio.get_running_loop().time()
                await asyncio.sleep(0.05)
                busy_s += asyncio.get_running_loop().time() - began
                replicas.end(f"{number}-{i}", at)

        tasks = [asyncio.create_task(client(i)) for i in range(3 * places)]
        await asyncio.sleep(seconds)
        assert busy_s > 0.7 * places * seconds
        for each in tasks:
            each.cancel()

    run(2, go)


def test_a_replica_whose_requests_ended_unheard_is_asked_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ongoing, "DOUBT_AFTER_S", 0.5)

    async def go(replicas: Replicas) -> None:
        await fill(replicas)
        replicas.busy = dict.fromkeys(replicas.busy, 0)
        waits = asyncio.create_task(replicas.send("waits"))
        await asyncio.sleep(0.3)
        assert not waits.done()
        await waits

    run(2, go)
