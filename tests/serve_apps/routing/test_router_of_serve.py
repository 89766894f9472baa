"""Which replica a request gets from Serve's router, with its own code and without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from serve_apps.routing.serve_router import PolicyRouter
from serve_apps.routing.spread import Spread

DEPLOYMENT = DeploymentID("replica", "chat:1")
PLACES = 4


class Replicas:
    """Some replicas of a deployment, with so many places each, behind the router that the gateway has."""

    def __init__(self, number: int) -> None:
        self.router = PolicyRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True, max_backoff_s=0.01
        )
        self.router.initialize_state("least_connections", "chat")
        ids = [ReplicaID(f"replica-{i}", DEPLOYMENT) for i in range(number)]
        self.busy = dict.fromkeys(ids, 0)
        self.router.update_replicas([self._replica(each) for each in ids])

    def _replica(self, replica_id: ReplicaID) -> Any:
        async def length(*, deadline_s: float) -> int:
            return self.busy[replica_id]

        return SimpleNamespace(
            replica_id=replica_id,
            actor_id=replica_id.unique_id,
            max_ongoing_requests=PLACES,
            get_queue_len=length,
            is_cross_language=False,
        )

    async def send(self, name: str, **fields: Any) -> str:
        """Give a request to a replica, as Serve's handles do; its name."""
        metadata = RequestMetadata(request_id=name, internal_request_id=name)
        pending = PendingRequest(args=[{"prompt": "a", **fields}], kwargs={}, metadata=metadata)
        again = False
        while True:
            found = (await self.router._choose_replica_for_request(pending, is_retry=again)).replica_id
            self.router.on_send_request(found)
            again = self.busy[found] >= PLACES  # then it refuses
            self.busy[found] += not again
            self.router.on_new_queue_len_info(found, self.busy[found])
            if not again:
                self.router.on_request_routed(pending, found, None)  # type: ignore[arg-type]
                return str(found.unique_id)
            self.router.on_request_completed(found, name)

    def end(self, name: str, replica: str) -> None:
        """The replica has answered the request."""
        replica_id = ReplicaID(replica, DEPLOYMENT)
        self.busy[replica_id] -= 1
        self.router.on_request_completed(replica_id, name)
        self.router.decrement_queue_len_cache(replica_id)


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
