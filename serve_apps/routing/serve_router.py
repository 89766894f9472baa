"""Routing policies as request routers of Ray Serve."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_apps.routing.least_connections import LeastConnections


class LeastConnectionsRouter(FIFOMixin, RequestRouter):
    """Counts this gateway's own requests on each replica and sends the next one where they are fewest.

    Serve goes through the replicas in the order given here and takes the first that has room; when none
    has, it waits a little and asks again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy: LeastConnections[ReplicaID] = LeastConnections()
        self._connections: dict[ReplicaID, int] = {}

    def initialize_state(self, **kwargs: Any) -> None:
        """Nothing to set; Serve passes request_router_kwargs here."""

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._connections[replica_id] = self._connections.get(replica_id, 0) + 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        # Once for each request that was sent, however it ended; refused ones too. What the replica reports
        # of itself is not used: it is older than this count, and a replica that seems fuller than it is
        # would get nothing that could correct it.
        super().on_request_completed(replica_id, internal_request_id)
        self._connections[replica_id] = max(0, self._connections.get(replica_id, 0) - 1)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Without this Serve asks again without a pause while every replica is full.
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._connections = {r: self._connections.get(r, 0) for r in replicas}
        return [[replicas[r]] for r in self._policy.order(self._connections)]
