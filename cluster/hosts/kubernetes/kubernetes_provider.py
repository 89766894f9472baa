"""The provider of pods: KubeRay's objects are applied by kubectl, and the head's pod does the rest."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.config.sections.cluster import ClusterConfig
from cluster.environment import passed_on
from cluster.errors import RequestError, ShoalError
from cluster.hosts.kubernetes.kubectl import Kubectl
from cluster.hosts.kubernetes.manifests import PROGRAM, as_yaml, manifests
from cluster.hosts.kubernetes.pod import HEAD_FILE
from cluster.hosts.kubernetes.pod_states import problems_of, state_of
from cluster.hosts.kubernetes.port_forward import KubernetesCluster, read_cluster
from cluster.hosts.provider import RemoteStarted, Tell, require_own_file, require_same_file, waiting_for
from cluster.state.record import (
    RECORD_FILE,
    TOKEN_FILE,
    ClusterRecord,
    made_of,
    read_record,
    token_of,
    write_record,
)
from cluster.state.state_directory import (
    locked,
    remove_state,
    require_private,
    state_directory,
)

UP_S = 1200.0
"""Longest that pods may take: an image of many gigabytes is pulled the first time."""
LOOK_S = 1.0
HOPELESS_S = 30.0
"""So long what will not change by itself is given to change all the same."""
CRD = "rayclusters.ray.io"
_HEAD_CONTAINER = "ray-head"


class KubernetesProvider:
    """Pods through KubeRay; see RemoteProvider.

    Args:
        shoal: what runs the command `shoal` with the Python of a pod.
    """

    def __init__(self, shoal: Sequence[str]) -> None:
        self._shoal = tuple(shoal)

    def up(
        self,
        cluster: ClusterConfig,
        config_path: Path,
        tell: Tell,
        command: Sequence[str],
        *,
        stay: bool = True,
    ) -> RemoteStarted:
        config_path = config_path.absolute()
        with locked(cluster.name, lambda: tell(waiting_for(cluster.name))):
            before = read_cluster(cluster.name)
            if before is not None:
                require_same_file(cluster.name, before.config_path, config_path)
            asked = cluster.kubernetes
            known = before or KubernetesCluster(
                cluster.name, str(config_path), asked.namespace, asked.context
            )
            kubectl = known.kubectl
            was_up = before is not None and read_record(cluster.name) is not None
            try:
                self._apply(cluster, kubectl, tell)
                known.write()
                head = self._until_up(cluster, kubectl, tell)
                file = self._file(kubectl, head)
                document = json.loads(self._on_head(kubectl, head, file, command))
                record = self._record(kubectl, head, file, known) if stay else None
            except BaseException:  # an interruption too must not leave half of it
                if before is None:
                    self._delete(known, tell)
                raise
            if not stay:
                self._delete(known, tell)
            elif was_up:
                tell(f"cluster {cluster.name} is up already")
            return RemoteStarted(record, was_up, document)

    def down(self, name: str, tell: Tell, command: Sequence[str], config_path: Path | None = None) -> bool:
        with locked(name, lambda: tell(waiting_for(name))):
            known = read_cluster(name)
            if known is None:
                return False
            require_own_file(name, known.config_path, config_path)
            kubectl = known.kubectl
            try:
                pods = [state_of(pod) for pod in self._pods(kubectl, name)]
                head = next((pod for pod in pods if pod.is_head and pod.ready), None)
                if head is None:
                    raise ShoalError("no head is ready")
                kubectl.execute(head.name, _HEAD_CONTAINER, [*PROGRAM, "end"], tell)
            except ShoalError as error:
                tell(f"jobs and apps are not ended first, so the next `shoal up` goes on with them: {error}")
            self._delete(known, tell)
            return True

    # -- objects ----------------------------------------------------------------------------------------

    @staticmethod
    def _apply(cluster: ClusterConfig, kubectl: Kubectl, tell: Tell) -> None:
        """Make the objects, or change them to what the config says.

        Raises:
            RequestError: the API server refuses one.
            ShoalError: it does not answer, or does not know KubeRay's.
        """
        environment = passed_on(cluster.env, os.environ, "cluster.env")
        try:
            kubectl.run("get", "customresourcedefinition", CRD, "--output=name")
        except RequestError as error:
            if "not found" in str(error).lower():
                raise ShoalError(
                    f"this Kubernetes cluster knows no {CRD}: KubeRay's operator is not installed there"
                ) from error
            # Whoever may not ask that may make one all the same.
            tell(f"it cannot be seen whether KubeRay is there: {error}")
        require_private(state_directory(cluster.name))
        objects = manifests(cluster, token_of(cluster.name), environment)
        tell(f"applying {len(objects)} objects in the namespace {kubectl.namespace}")
        kubectl.run("apply", "--filename=-", given=as_yaml(objects))

    def _until_up(self, cluster: ClusterConfig, kubectl: Kubectl, tell: Tell) -> str:
        """Wait until all pods are ready, and the head answers; the head's name.

        Raises:
            ShoalError: it is hopeless, or takes too long.
        """
        wanted = sum(kind.count for kind in cluster.nodes)
        deadline, pause = time.monotonic() + UP_S, threading.Event()
        said: set[str] = set()
        hopeless_since: float | None = None
        while True:
            pods = [state_of(pod) for pod in self._pods(kubectl, cluster.name)]
            problems = [pod.problem for pod in pods if pod.problem]
            problems += problems_of(
                kubectl.get(CRD, cluster.name),
                kubectl.get("events", f"--field-selector=involvedObject.name={cluster.name}")["items"],
            )
            for problem in problems:
                if problem not in said:
                    tell(problem)
                said.add(problem)
            head = next((pod for pod in pods if pod.is_head and pod.ready), None)
            if head is not None and sum(pod.ready for pod in pods) >= wanted:
                return head.name
            stuck = [pod.problem for pod in pods if pod.hopeless]
            now = time.monotonic()
            hopeless_since = (hopeless_since or now) if stuck else None
            if hopeless_since is not None and now - hopeless_since > HOPELESS_S:
                raise ShoalError("\n".join(stuck))
            if now > deadline:
                raise ShoalError(
                    f"{sum(pod.ready for pod in pods)} of {wanted} pods are ready after {UP_S:.0f} s"
                    + "".join(f"\n{problem}" for problem in problems)
                )
            pause.wait(LOOK_S)

    @staticmethod
    def _pods(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = kubectl.get("pods", f"--selector=ray.io/cluster={name}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def _delete(self, known: KubernetesCluster, tell: Tell) -> None:
        """Delete all that belongs to it, and forget it."""
        kinds = f"{CRD},poddisruptionbudgets,services,secrets"
        selector = f"--selector=app.kubernetes.io/managed-by=shoal,app.kubernetes.io/part-of={known.name}"
        try:
            known.kubectl.run("delete", kinds, selector, "--wait=true", timeout_s=UP_S)
        except ShoalError as error:
            tell(f"not everything could be deleted: {error}")
        (read_cluster(known.name) or known).close()  # what forwards may have been started since
        remove_state(known.name)

    # -- what runs on the head --------------------------------------------------------------------------

    def _file(self, kubectl: Kubectl, head: str) -> str:
        """The config of commands on the head, there."""
        place = ["python", "-c", "from cluster.state.state_directory import state_root; print(state_root())"]
        root = kubectl.execute(head, _HEAD_CONTAINER, place, lambda _: None).strip()
        return f"{root}/{HEAD_FILE}"

    def _on_head(self, kubectl: Kubectl, head: str, file: str, command: Sequence[str]) -> str:
        """What a command on the head prints. The pod has brought the cluster up by itself, or is about to:
        what the command says of that is no news."""
        program = ["python", *self._shoal, *command, "-f", file]
        return kubectl.execute(head, _HEAD_CONTAINER, program, lambda _: None)

    def _record(self, kubectl: Kubectl, head: str, file: str, known: KubernetesCluster) -> ClusterRecord:
        """What is known here of the cluster, as it is reached from here."""
        path = Path(file).parent / known.name / RECORD_FILE
        printed = kubectl.execute(head, _HEAD_CONTAINER, ["cat", str(path)], lambda _: None)
        there = made_of(ClusterRecord, json.loads(printed), path)
        known = known.forwarding({"api": there.api_port, "gateway": there.gateway_port})
        known.write()
        record = replace(
            there,
            provider="kubernetes",
            nodes=(),
            config_path=known.config_path,
            base_dir=os.path.dirname(known.config_path),
            token_path=str(state_directory(known.name) / TOKEN_FILE),
            env={},
            **known.endpoints(),
        )
        known.open_way()
        write_record(record)
        return record
