"""The section `cluster.kubernetes`: the RayCluster whose pods are the nodes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from cluster.config.sections.section import Section

LABEL_KEY = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
OWN_OF_PODS = ("containers", "restartPolicy", "terminationGracePeriodSeconds", "serviceAccountName")
OWN_OF_CONTAINERS = ("name", "image", "command", "args", "lifecycle")
"""What Shoal says itself."""


def _like(pattern: str, words: str) -> AfterValidator:
    def check(value: str) -> str:
        if re.fullmatch(pattern, value, re.ASCII) is None:
            raise ValueError(f"should be {words}, was {value!r}")
        return value

    return AfterValidator(check)


ObjectName = Annotated[
    str,
    _like(
        r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
        "a name of Kubernetes' (lower-case letters, digits and `-`, at most 63)",
    ),
]
Image = Annotated[str, _like(r"[\w][\w.:/@-]*", "an image, as REGISTRY/NAME:TAG")]
LabelKey = Annotated[str, _like(LABEL_KEY, "the key of a label of Kubernetes'")]
LabelValue = Annotated[str, _like(LABEL_VALUE, "the value of a label of Kubernetes'")]
Quantity = Annotated[str, _like(_QUANTITY, "an amount as Kubernetes writes it (16Gi, 500Mi)")]


class Toleration(Section):
    """A taint of machines on which pods may run all the same."""

    key: LabelKey | None = None
    """None with `Exists`: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: LabelValue | None = None
    """With `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """None: each."""
    seconds: int | None = Field(default=None, ge=0)
    """With `NoExecute`: how long a pod stays. None: for ever."""


class StoreConfig(Section):
    """Where Ray's control store keeps what it knows, so that the cluster outlives its head (KubeRay's GCS
    fault tolerance)."""

    backend: Literal["redis", "rocksdb"]
    """A Redis of yours; or a volume of the head's, for which KubeRay's operator needs its feature gate
    GCSFaultToleranceEmbeddedStorage."""
    address: Annotated[str, _like(r"[\w.-]+:\d{1,5}", "HOST:PORT")] | None = None
    """With `redis`."""
    password_secret: ObjectName | None = None
    """With `redis`: the Secret with its password, under the key `password`."""
    size: Quantity | None = None
    """With `rocksdb`: of the volume that is made. Default: KubeRay's."""
    claim: ObjectName | None = None
    """With `rocksdb`: a PersistentVolumeClaim that is there, instead."""


class AutoscalerConfig(Section):
    """Pods that come and go with what jobs and apps wait for (KubeRay's autoscaler, which is told of it)."""

    most: dict[str, Annotated[int, Field(ge=0, le=1000)]] = Field(default={})
    """Most pods of each kind of node, by its name, whose `count` is the least; other kinds stay as they
    are."""
    idle_s: int = Field(default=300, ge=0)
    """Seconds after which a pod that nothing runs on goes."""
    upscaling: Literal["Default", "Aggressive", "Conservative"] = "Default"
    """How fast pods are asked for."""


class KubernetesConfig(Section):
    """What is asked of Kubernetes for the cluster: a RayCluster of KubeRay's, and what belongs to it."""

    context: Annotated[str, Field(min_length=1)] | None = None
    """The context of kubectl's. Default: its current one."""
    namespace: ObjectName = "default"
    image: Image | None = None
    """With this very Shoal; `shoal render container` prints what it is made from."""
    pull_secrets: list[ObjectName] = Field(default=[])
    """Secrets with which the image is pulled."""
    service_account: ObjectName | None = None
    """Of all pods. Default: the namespace's."""
    storage_claim: ObjectName | None = None
    """The PersistentVolumeClaim that all pods mount (ReadWriteMany) where cluster.storage says. Default:
    none; the storage is an object store then."""
    memory: Quantity | None = None
    """Of each pod. Default: whatever its machine leaves."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """What Kubernetes calls the GPUs of a machine."""
    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    """Labels of the machines that pods may run on."""
    tolerations: list[Toleration] = Field(default=[])
    store: StoreConfig | None = None
    """Default: Ray's control store ends with the head."""
    autoscaler: AutoscalerConfig | None = None
    """Default: the number of pods stays."""
    network_policy: bool = False
    """Whether only the cluster's own pods reach its ports, and all others those of the gateway and the
    control API. KubeRay's operator needs its feature gate RayClusterNetworkPolicy."""
    monitor: bool = False
    """Whether Prometheus' operator is told of the cluster (a ServiceMonitor)."""
    notice_s: int = Field(default=120, ge=10, le=3600)
    """Seconds that a pod has to leave when it is deleted: jobs save, requests are finished."""
    pod: dict[str, Any] = Field(default={})
    """Further fields of every pod's spec, as Kubernetes has them; lists come behind those that are there."""
    container: dict[str, Any] = Field(default={})
    """The same of the container in every pod (env, volumeMounts, securityContext)."""
