"""Tells KubeRay's autoscaler which pods are of use: nobody of Shoal's waits in Ray where there is no room, so
Ray by itself would never hear of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import ray

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import start_on_head
from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from cluster.sharing.client import BrokerClient
from cluster.sharing.growth import NodeKind
from cluster.state.nodes import KIND_LABEL

NAME = "shoal-pod-wants"
LOOK_EVERY_S = 2.0
AGAIN_S = 30.0
"""So often it is told what it knows: a control store that was restarted does not."""

logger = logging.getLogger(__name__)


class PodWants:
    """The actor; it has a thread that looks, and tells.

    Args:
        kinds: of which pods may come and go.
    """

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self._kinds = list(kinds)
        threading.Thread(target=self._run, daemon=True).start()

    def hears(self) -> None:
        """Answer."""

    def _run(self) -> None:
        told: dict[str, int] = {}
        told_at, pause = time.monotonic(), threading.Event()
        while True:
            try:
                found = BrokerClient().nodes_of_use(self._kinds)
                now = time.monotonic()
                if found is not None and (found != told or now - told_at > AGAIN_S):
                    tell_autoscaler(found, self._kinds)
                    told, told_at = found, now
            except (ShoalError, ray.exceptions.RayError, RuntimeError) as error:
                logger.warning("the autoscaler could not be told which pods are of use: %s", error)
            pause.wait(LOOK_EVERY_S)


def tell_autoscaler(counts: Mapping[str, int], kinds: Sequence[NodeKind]) -> None:
    """Have so many pods of each kind be there, or come; others go once they are idle.

    Each is named by all that it has: so it is a pod that is counted, whatever runs on it.
    """
    from ray.autoscaler.sdk import request_resources

    wanted = [kind for kind in kinds for _ in range(counts[kind.name])]
    request_resources(
        bundles=[dict(kind.resources) for kind in wanted],
        bundle_label_selectors=[{KIND_LABEL: kind.name} for kind in wanted],
    )


def kinds_of_pods(cluster: ClusterConfig) -> list[NodeKind]:
    """Those of the config of which Ray hands something out; not the head's, which stays."""
    autoscaler = cluster.kubernetes.autoscaler
    most = {} if autoscaler is None else autoscaler.most
    return [
        NodeKind(
            kind.name,
            most.get(kind.name, kind.count),
            {name: float(count) for name, count in (("CPU", kind.cpus), ("GPU", kind.gpus)) if count},
            kind.accelerator,
        )
        for kind in cluster.nodes[1:]
        if kind.cpus or kind.gpus
    ]


def start_pod_wants(cluster: ClusterConfig) -> None:
    """Start it on the head, and wait until it answers; one that runs is left alone.

    Raises:
        ShoalError: it did not start in time.
    """
    kinds = kinds_of_pods(cluster)
    start_on_head(
        PodWants, NAME, NAMESPACE, kinds, what="what tells the autoscaler of wants", first_call="hears"
    )
