"""How tenants and the command line talk to the broker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor, NoActorError
from cluster.errors import ShoalError
from cluster.sharing.broker import BROKER_NAME
from cluster.sharing.demand import Demand, Grant
from cluster.sharing.events import units_of
from cluster.sharing.growth import NodeKind
from cluster.sharing.ledger import TTL_S
from cluster.sharing.node_health import Against
from cluster.wording import amounts

CALL_TIMEOUT_S = 20.0
"""Longest that one call may take; a broker that restarts is back well before."""
RENEW_TIMEOUT_S = TTL_S / 3
"""The same for a call that renews a lease: whoever waits longer for an answer may lose it meanwhile."""
POLL_S = 0.25
EXPLAIN_EVERY_S = 5.0
"""Between two looks at why a demand waits."""
_NO_BROKER = (
    "no broker: the Ray cluster this process is connected to was not started by `shoal up`"
    " (or is going down); is the cluster up?"
)


class NoAnswerError(ShoalError):
    """The broker did not answer in time."""


class BrokerClient:
    """A connection to the cluster's broker; needs a connection to the cluster (`ray.init`).

    Not tied to a thread. Every call raises ShoalError when the broker does not answer in time.

    Raises:
        ShoalError: the cluster has no broker.
    """

    def __init__(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        if not ray.is_initialized():
            raise ShoalError("no broker: this process is not connected to a cluster; is the cluster up?")
        self._actor = NamedActor(BROKER_NAME, NAMESPACE)
        try:
            self._actor.find()
        except NoActorError as error:
            raise ShoalError(_NO_BROKER) from error

    def info(self) -> dict[str, Any]:
        """The facts about the cluster that `up` gave: name, storage, gateway_host, gateway_port, …"""
        return self._call("info")

    def request(self, demand: Demand) -> Grant:
        """Register or refresh a demand (which is its heartbeat); returns what the holder may run now.

        `held` names the node of every unit that runs, is being started, or is still ending. A holder starts
        units by its newest grant only: one that gets no answer starts nothing until it has one. Of a gang
        that has to go all units have ended before another of the same holder starts on a node of it.
        """
        return self._call("request", demand, timeout_s=min(self._timeout_s, RENEW_TIMEOUT_S))

    def preview(self, demand: Demand) -> Grant | None:
        """What a demand would be granted now, if its holder asked; it is not noted. None: not known."""
        return self._call("preview", demand)

    def watch(self, known: Mapping[str, Grant], hold_s: float) -> ray.ObjectRef:
        """Has been answered once one of these holders is to know another grant, or after so many seconds.

        Whoever sees that asks again: this tells the broker nothing.

        Raises:
            ShoalError: the cluster has no broker.
        """
        try:
            return self._actor.find().watch.options(max_task_retries=0).remote(dict(known), hold_s)
        except NoActorError as error:
            raise ShoalError(_NO_BROKER) from error

    def wait(
        self,
        demand: Demand,
        timeout_s: float | None,
        stop: Callable[[], bool] | None = None,
        *,
        poll_s: float = POLL_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> Grant:
        """Ask until the grant holds at least `demand.min` units, or `stop()` is true (returns what there is).

        Args:
            on_wait: told why it waits, at once and whenever that is for another reason than before, but not
                more often than every few seconds.

        Raises:
            ShoalError: that was not so within `timeout_s` (None waits for ever). The lease is released,
                unless units of it run.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reason, explain_at = "", -math.inf
        while True:
            grant = self._patient_request(demand)
            if grant.units >= demand.min or (stop is not None and stop()):
                return grant
            if on_wait is not None and time.monotonic() >= explain_at:
                explain_at = time.monotonic() + EXPLAIN_EVERY_S
                explained = self.explain(demand.holder)
                if explained is not None and explained["text"] != reason:
                    reason = explained["text"]
                    on_wait(reason)
            if deadline is not None and time.monotonic() >= deadline:
                message = self.why_not(demand, timeout_s or 0.0)
                if not demand.held:
                    self.release(demand.holder)
                raise ShoalError(message)
            ray.wait([self.watch({demand.holder: grant}, poll_s)], timeout=poll_s)

    def _patient_request(self, demand: Demand) -> Grant:
        """Ask again where there is no answer in time, for as long as any call may take."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self.request(demand)
            except NoAnswerError:
                if time.monotonic() >= deadline:
                    raise

    def suspect(self, node_ids: Collection[str]) -> list[str]:
        """Have these nodes looked at now, before Ray has noticed; returns the ids of those that are gone.

        Nothing is granted there until they answer again.
        """
        return self._call("suspect", sorted(node_ids))

    def release(self, holder: str) -> None:
        """End a lease; nothing happens when there is none."""
        self._call("release", holder)

    def leases(self) -> list[dict[str, Any]]:
        """One row a holder: holder, kind, min, max, granted, wants, nodes (node ids)."""
        return self._call("leases")

    def explain(self, holder: str) -> dict[str, Any] | None:
        """Why a holder waits or has what it has, as Explanation has it; None when it has no lease."""
        return self._call("explain", holder)

    def why_not(self, demand: Demand, waited_s: float) -> str:
        """Why a demand has not been granted: what it asks for, and why it waits."""
        asked = f"{units_of(demand.kind, demand.min)} of {amounts(demand.unit)} each"
        explained = self.explain(demand.holder)
        reason = f": {explained['text']}" if explained is not None else ""
        return f"{demand.holder}: no room for {asked} within {waited_s:g} s{reason}"

    def blame(self, node_id: str, holder: str, against: Against, step: int, *, elsewhere: bool) -> None:
        """Report a failure that speaks against a node: nothing starts for a while where they are repeated.

        Args:
            against: "node" where it was lost or its accelerator is broken, else the class of what its ranks
                met: "worker" or "transient".
            step: steps that the job had done.
            elsewhere: the job had ranks on other nodes, and they did not fail.
        """
        self._call("blame", node_id, holder, against, step, elsewhere)

    def avoided(self) -> dict[str, dict[str, Any]]:
        """The nodes that fail jobs and are avoided, by node id: reason, since, until (UTC), times."""
        return self._call("avoided")

    def forgive(self, node_id: str) -> bool:
        """Trust a node again, whatever was said against it; whether it was avoided."""
        return self._call("forgive", node_id)

    def misfits(self) -> dict[str, list[str]]:
        """Why nodes that do not fit do not, by node id."""
        return self._call("misfits")

    def alive(self) -> dict[str, bool]:
        """The nodes that Ray says are alive, by id: False where one is about to go, or does not fit."""
        return self._call("alive")

    def judged(self) -> list[str]:
        """The ids of the nodes that were looked at since the broker's start."""
        return self._call("judged")

    def judge(self, misfits: Mapping[str, list[str]]) -> None:
        """Say of nodes, by id, why they do not fit; nothing of those that do."""
        self._call("judge", dict(misfits))

    def nodes_of_use(self, kinds: Sequence[NodeKind]) -> dict[str, int] | None:
        """How many nodes of each kind hold what runs, or would if they were there; None while the broker does
        not know yet."""
        return self._call("nodes_of_use", list(kinds))

    def kinds(self) -> list[NodeKind]:
        """The nodes that can be had, the head's left out; none where all nodes are there already."""
        return self._call("kinds")

    def foreign(self) -> dict[str, dict[str, float]]:
        """What strangers use of the nodes, by node id, in Ray's names."""
        return self._call("foreign")

    def events(self, after: tuple[int, int] | None = None, most: int = 1000) -> list[dict[str, Any]]:
        """The events after a place (epoch, seq), the oldest first; without a place, the newest."""
        return self._call("events", after, most)

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self._timeout_s
        try:
            return self._actor.call(method, *arguments, timeout_s=timeout_s)
        except NoActorError as error:
            raise ShoalError(_NO_BROKER) from error
        except ray.exceptions.GetTimeoutError as error:
            raise NoAnswerError(f"the broker did not answer within {timeout_s:.0f} s") from error
        except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError) as error:
            raise ShoalError(f"no broker: it is gone ({error}); is the cluster up?") from error
