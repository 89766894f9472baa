"""What there is to see of a cluster: nodes, leases, jobs, apps, and why each has what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.node.node_agent import memory_of_nodes
from cluster.sharing.client import BrokerClient
from cluster.state.connection import ClusterRecord
from cluster.state.nodes import node_states
from train_jobs.driver.submission import Submissions
from train_jobs.records.job_table import JobTable

JOB, APP = "job/", "app/"
"""How the holders of their leases begin."""
Told = TypeVar("Told")
EventPlace = tuple[int, int]


class ClusterSight:
    """What may be seen of a cluster by whoever is connected to it (`ray.init`). Not tied to a thread.

    Args:
        submissions: finds Ray's job API, once it is needed.
        jobs: those of its storage.
    """

    def __init__(
        self, record: ClusterRecord, submissions: Callable[[], Submissions], jobs: JobTable | None = None
    ) -> None:
        self._record = record
        self._jobs = jobs or JobTable(Storage(record.storage))
        self._submissions = submissions

    def status(self, *, fresh: bool = False) -> dict[str, Any]:
        """What `status --json` prints; what one part of the cluster does not tell is left empty, and said in
        `notes`.

        Args:
            fresh: the cluster was started a moment ago, so that nobody has a lease and nothing runs; Serve,
                which takes seconds to import, need not be asked.
        """
        record, notes = self._record, list[str]()

        def told(ask: Callable[[], Told], otherwise: Told) -> Told:
            try:
                return ask()
            except ShoalError as error:
                if str(error) not in notes:
                    notes.append(str(error))
                return otherwise

        statuses = {} if fresh else told(lambda: self._submissions().statuses(), None)
        nothing: list[dict[str, Any]] = []
        unknown: dict[str, Any] = {
            "url": record.serve_url,
            "status": "unknown",
            "proxies": [],
            "note": None,
            "gateways": [],
            "front": None,
        }
        return {
            "name": record.name,
            "address": record.gcs_address,
            "dashboard_url": record.dashboard_url,
            "base_url": record.gateway_url,
            "storage": record.storage,
            "nodes": told(lambda: self.nodes(with_memory=not fresh), nothing),
            "leases": nothing if fresh else told(self.leases, nothing),
            "jobs": told(lambda: self._jobs.rows(statuses), nothing),
            "apps": nothing if fresh else told(self.apps, nothing),
            "serve": unknown if fresh else told(self._serve, unknown),
            "notes": notes,
        }

    def nodes(self, *, with_memory: bool = False) -> list[dict[str, Any]]:
        """Each with what it has and uses, what strangers use, why it is avoided, why it does not fit, and the
        bytes of memory that Shoal's own processes take there, by what they are; None: it
        does not say, or is not asked: each looks at all of its processes for that."""
        broker = BrokerClient()
        foreign, avoided, misfits = broker.foreign(), broker.avoided(), broker.misfits()
        states = node_states()
        alive = [state.node_id for state in states if state.alive]
        memory = memory_of_nodes(alive) if with_memory else {}
        return [
            {
                **state.as_json(),
                "foreign": foreign.get(state.node_id, {}),
                "avoided": avoided.get(state.node_id),
                "misfits": misfits.get(state.node_id, []),
                "memory_by_kind": memory.get(state.node_id),
            }
            for state in states
        ]

    def leases(self) -> list[dict[str, Any]]:
        """Who has how many of what it wants."""
        return BrokerClient().leases()

    def events(self, after: EventPlace | None = None, most: int = 1000) -> list[dict[str, Any]]:
        """What has changed hands and why, the oldest first; the last of them, or those after one."""
        return BrokerClient().events(after=after, most=most)

    def apps(self) -> list[dict[str, Any]]:
        """See `app_statuses`."""
        from serve_apps.status import app_statuses

        return app_statuses()

    def _serve(self) -> dict[str, Any]:
        from serve_apps.status import serve_status

        return serve_status(self._record.serve_url)

    def forgive(self, node: str) -> bool:
        """Trust a node again that is avoided, by its name; whether it was.

        Raises:
            RequestError: there is no such node.
        """
        ids = {state.name: state.node_id for state in node_states() if state.alive}
        if node not in ids:
            raise RequestError(f"no node {node!r} is there; there are {', '.join(ids)}")
        return bool(BrokerClient().forgive(ids[node]))

    def explain(self, name: str) -> dict[str, Any]:
        """Why a job or an app waits, or has the devices it has: `leases`, each with its `text`, and a `note`
        on why an app does not answer though it has them.

        Args:
            name: a job's id or name, an app, or a lease's holder.

        Raises:
            ShoalError: it has no lease now.
            RequestError: nothing is called so.
        """
        broker = BrokerClient()
        known = [row["holder"] for row in broker.leases()]
        jobs = self._jobs.rows()
        found = [row for row in map(broker.explain, holders_of(name, known, jobs)) if row is not None]
        if not found:
            jobs = self._jobs.rows(self._submissions().statuses())
            raise nothing_to_explain(name, known, jobs)
        return {"name": name, "leases": found, "note": self._why_away(name, known)}

    def _why_away(self, name: str, holders: Iterable[str]) -> str | None:
        if not any(holder.startswith(APP) for holder in holders):
            return None  # nothing is served: what asks Serve is not even loaded
        try:
            notes = {row["name"]: row["note"] for row in self.apps()}
        except ShoalError as error:  # what is known of the leases is said all the same
            return str(error)
        return notes.get(name.removeprefix(APP))


def holders_of(name: str, holders: Iterable[str], jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The holders of leases that a name means: of an app, with the leases of its rollout; of a job, or of the
    newest job of a name that has a lease; or the one that has this very name."""
    known = sorted(holders)
    newest = [row["job"] for row in reversed(jobs) if row["name"] == name and JOB + row["job"] in known][:1]
    wanted = {name, APP + name, JOB + name, *(JOB + job for job in newest)}
    return [holder for holder in known if holder in wanted or holder.startswith(f"{APP}{name}:")]


def nothing_to_explain(name: str, holders: Sequence[str], jobs: Sequence[Mapping[str, Any]]) -> ShoalError:
    """Why there is nothing to say about a name: it has no lease now, or nobody knows it."""
    of_name = [row for row in jobs if name in (row["job"], row["name"])]
    if of_name:
        row = of_name[-1]
        return ShoalError(f"{row['job']} has no lease: it {_is(row['status'])}")
    names = {holder.partition("/")[2] for holder in holders} | {row["name"] for row in jobs}
    known = f"known are {', '.join(sorted(names))}" if names else "there are no jobs and no apps"
    return RequestError(f"nothing is called {name!r} here; {known}")


def _is(status: str) -> str:
    return {"succeeded": "succeeded", "failed": "failed", "stopped": "was stopped"}.get(
        status, f"is {status}"
    )
