"""Routing policies as a request router of Ray Serve.

Which of the requests that wait gets a replica is private in Ray; a test fails when Ray changes it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_apps.routing import POLICIES
from serve_apps.routing.active import is_active
from serve_apps.routing.decisions import note
from serve_apps.routing.policy import LOOKED_AT, LeastConnections, Policy, Prompt
from serve_apps.routing.spread import AT, may_take, taken


class PolicyRouter(FIFOMixin, RequestRouter):
    """Tells a policy what this gateway sends to each replica and gets back, and takes the order it gives.

    Serve goes through the replicas in that order and takes the first that has room; when none has, it waits
    a little and asks again. A replica with room is given to the request that has waited for longest, of those
    that it may take: see `spread`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy: Policy[ReplicaID] = LeastConnections()
        self._names = "", "least_connections"
        """Of the app and the policy."""
        self._application = ""

    def initialize_state(
        self, policy: str = "least_connections", app: str = "", application: str = ""
    ) -> None:
        """Serve passes request_router_kwargs here: the names of the policy, the app, and its application."""
        self._names, self._application = (app, policy), application
        module, _, name = POLICIES[policy].partition(":")
        self._policy = getattr(import_module(module), name)()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._policy.sent(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        request_id = pending_request.metadata.internal_request_id
        reason = self._policy.routed(replica_id, request_id, time.monotonic(), _prompt_of(pending_request))
        note(*self._names, reason)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        # Once for each request that was sent, however it ended; refused ones too. What the replica reports
        # of itself is not used: it is older than this count, and a replica that seems fuller than it is
        # would get nothing that could correct it.
        super().on_request_completed(replica_id, internal_request_id)
        self._policy.completed(replica_id, internal_request_id, time.monotonic())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Without this Serve asks again without a pause while every replica is full.
            pending_request.routing_context.should_backoff = True
        replicas = {
            replica.replica_id: replica
            for replica in candidate_replicas
            if is_active(self._application, replica.replica_id.unique_id)
        }
        if pending_request is None:
            return [[replicas[r]] for r in self._policy.order(list(replicas))]
        request = _request_of(pending_request)
        at = request.get(AT) if isinstance(request, Mapping) else None
        if at is not None and (home := [r for r in replicas if r.unique_id == at]):
            return [[replicas[r]] for r in home]
        order = self._policy.order(list(replicas), _prompt_of(pending_request))
        # The others are gone through too: what waits behind this request may be taken there.
        order.sort(key=lambda replica: not may_take(request, replica))
        return [[replicas[r]] for r in order]

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give a replica with room to a request that waits, if it may take any."""
        waiting = self._pending_requests_to_fulfill
        for place, pending in enumerate(waiting):
            if not pending.future.done() and self._may_take(_request_of(pending), replica.replica_id):
                # Serve gives it to the first.
                del waiting[place]
                waiting.appendleft(pending)
                taken(_request_of(pending), replica.replica_id)
                super()._fulfill_next_pending_request(replica, request_metadata)
                return

    def _may_take(self, request: Any, replica: ReplicaID) -> bool:
        if not is_active(self._application, replica.unique_id):
            return False
        at = request.get(AT) if isinstance(request, Mapping) else None
        elsewhere = at is not None and replica.unique_id != at
        if elsewhere and any(each.unique_id == at for each in self.curr_replicas):
            return False
        return may_take(request, replica)


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
