"""Routing policies as a request router of Ray Serve.

Which of the requests that wait gets a replica, and what a replica says of its queue, is private in Ray: tests
fail when Ray changes it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_apps.routing import POLICIES
from serve_apps.routing.active import gateways, is_active, on_news
from serve_apps.routing.decisions import note
from serve_apps.routing.ongoing import LOOK_EVERY_S, OngoingRequests
from serve_apps.routing.policy import LOOKED_AT, LeastConnections, Policy, Prompt
from serve_apps.routing.spread import AT, may_take, taken


class PolicyRouter(FIFOMixin, RequestRouter):
    """Tells a policy what this gateway sends to each replica and gets back, and takes the order it gives.

    Serve goes through the replicas in that order, asks each for its queue where it does not know that, and
    takes the first that has room. It is given none that is full by what was sent there (see `ongoing`); while
    all are, what looks for a replica sleeps until a place is free. A replica with room is given to whichever
    request has waited for longest, of those that it may take: see `spread`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy: Policy[ReplicaID] = LeastConnections()
        self._names = "", "least_connections"
        """Of the app and the policy."""
        self._application = ""
        self._ongoing: OngoingRequests[ReplicaID] = OngoingRequests()
        self._given: dict[int, ReplicaID] = {}
        """By request (`id`), the replica that it was given to and has not been sent to yet."""
        self._asleep: deque[asyncio.Future[None]] = deque()
        """What looks for a replica and found none."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """In which it sleeps."""
        self._look_again: asyncio.TimerHandle | None = None

    def initialize_state(
        self, policy: str = "least_connections", app: str = "", application: str = ""
    ) -> None:
        """Serve passes request_router_kwargs here: the names of the policy, the app, and its application."""
        self._names, self._application = (app, policy), application
        module, _, name = POLICIES[policy].partition(":")
        self._policy = getattr(import_module(module), name)()
        on_news(self._on_active)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._policy.sent(replica_id)
        self._ongoing.sent(replica_id, time.monotonic())

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._said(replica_id, num_ongoing_requests)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        request_id = pending_request.metadata.internal_request_id
        reason = self._policy.routed(replica_id, request_id, time.monotonic(), _prompt_of(pending_request))
        note(*self._names, reason)
        self._ongoing.taken(replica_id, time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        # Once for each request that was sent, however it ended; refused ones too. What the replica reports
        # of itself is not used by policies: it is older than this count, and a replica that seems fuller than
        # it is would get nothing that could correct it.
        super().on_request_completed(replica_id, internal_request_id)
        self._policy.completed(replica_id, internal_request_id, time.monotonic())
        self._ongoing.ended(replica_id, time.monotonic())
        self._wake()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._ongoing.keep_only(self.curr_replicas)
        self._wake_all()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Without this Serve asks again without a pause where a request may go to no replica with room.
            pending_request.routing_context.should_backoff = True
        while candidate_replicas:
            if found := self._with_room(candidate_replicas, pending_request):
                return [[replica] for replica in found]
            await self._sleep()
            candidate_replicas = list(self.curr_replicas.values())
        return []

    def _with_room(
        self, candidates: list[RunningReplica], pending_request: PendingRequest | None
    ) -> list[RunningReplica]:
        """The replicas that may have room, best first; those that this request may not go to come last: what
        waits behind it may be taken there."""
        replicas = {
            replica.replica_id: replica
            for replica in candidates
            if is_active(self._application, replica.replica_id.unique_id)
        }
        if pending_request is None:
            order = self._policy.order(list(replicas))
        else:
            order = self._policy.order(list(replicas), _prompt_of(pending_request))
            order.sort(key=lambda replica: not self._may_take(_request_of(pending_request), replica))
        all_places = sum(each.max_ongoing_requests for each in replicas.values())
        self._ongoing.share = all_places / gateways() if gateways() > 1 else math.inf
        now = time.monotonic()
        return [
            replicas[each]
            for each in order
            if self._ongoing.may_have_room(each, replicas[each].max_ongoing_requests, now)
        ]

    async def _sleep(self) -> None:
        """Until there may be a replica with room."""
        self._loop = asyncio.get_running_loop()
        self._look_again_later()
        woken = self._loop.create_future()
        self._asleep.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            if woken.done() and not woken.cancelled():
                self._wake()  # it was about to take a place, which is another's then
            raise
        finally:
            with suppress(ValueError):
                self._asleep.remove(woken)

    def _wake(self) -> None:
        """Have one look for a replica: what it finds goes to the request that has waited for longest."""
        while self._asleep:
            if not (woken := self._asleep.popleft()).done():
                woken.set_result(None)
                return

    def _wake_all(self) -> None:
        while self._asleep:
            self._wake()

    def _look_again_later(self) -> None:
        """Others leave places too, which nobody tells of."""
        if self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        self._wake()
        if self._asleep:
            self._look_again_later()

    def _on_active(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_all)

    def _said(self, replica_id: ReplicaID, number: int) -> None:
        if (replica := self.curr_replicas.get(replica_id)) is not None:
            most = replica.max_ongoing_requests
            self._ongoing.said(replica_id, number, most, time.monotonic())
            if number < most:
                self._wake()

    async def _probe_queue_lens(
        self, replicas: list[RunningReplica], backoff_index: int
    ) -> list[tuple[RunningReplica, int | None]]:
        answers = await super()._probe_queue_lens(replicas, backoff_index)
        for replica, number in answers:
            if number is not None:
                self._said(replica.replica_id, number)
        return answers

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        finally:
            # Now it is sent, and counted as that, or it was called off.
            if (given := self._given.pop(id(pending_request), None)) is not None:
                self._ongoing.not_sent(given, time.monotonic())
                asyncio.get_running_loop().call_soon(self._wake)

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give a replica with room to a request that waits, if it may take any."""
        waiting = self._pending_requests_to_fulfill
        for place, pending in enumerate(waiting):
            if not pending.future.done() and self._may_take(_request_of(pending), replica.replica_id):
                # Serve gives it to the first.
                del waiting[place]
                waiting.appendleft(pending)
                taken(_request_of(pending), replica.replica_id)
                # At once, so that nobody else is given the same place until it is sent.
                self._given[id(pending)] = replica.replica_id
                self._ongoing.sent(replica.replica_id, time.monotonic())
                super()._fulfill_next_pending_request(replica, request_metadata)
                return

    def _may_take(self, request: Any, replica: ReplicaID) -> bool:
        if not is_active(self._application, replica.unique_id):
            return False
        at = request.get(AT) if isinstance(request, Mapping) else None
        if at is not None and replica.unique_id != at and self._is_home(at):
            return False
        return may_take(request, replica)

    def _is_home(self, unique_id: str) -> bool:
        return is_active(self._application, unique_id) and any(
            each.unique_id == unique_id for each in self.curr_replicas
        )


def _request_of(pending: PendingRequest) -> Any:
    return pending.args[0] if pending.args else None


def _prompt_of(pending: PendingRequest) -> Prompt:
    """What a request of ours asks about; nothing where it is none."""
    request = _request_of(pending)
    if not isinstance(request, Mapping):
        return ""
    # A replica's cache helps requests with the same salt only.
    salt = request.get("cache_salt", "")
    if "messages" in request:
        return salt + "\n".join(f"{m.get('role')}: {m.get('content')}" for m in request["messages"])
    prompt: Prompt = request.get("prompt", "")
    if not salt:
        return prompt
    beginning = prompt[:LOOKED_AT]
    return salt + beginning if isinstance(beginning, str) else (*salt.encode(), *beginning)
