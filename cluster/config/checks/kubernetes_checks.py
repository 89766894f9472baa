"""What is wrong with the section `kubernetes`, and with names that Kubernetes does not take."""

from __future__ import annotations

import os
import re

from cluster.config.checks.ground import MistakeReport, local_path
from cluster.config.sections.cluster import ClusterConfig
from cluster.config.sections.kubernetes import (
    LABEL_VALUE,
    OWN_OF_CONTAINERS,
    OWN_OF_PODS,
    KubernetesConfig,
    StoreConfig,
)

MOST_LETTERS = 53
"""Of a RayCluster's name: KubeRay makes longer ones of it."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def check_kubernetes(cluster: ClusterConfig, report: MistakeReport) -> None:
    """Report every mistake."""
    if cluster.provider != "kubernetes":
        if cluster.kubernetes != KubernetesConfig():
            report("kubernetes", None, "is for `provider: kubernetes`", "provider")
        return
    _check_names(cluster, report)
    asked = cluster.kubernetes
    if asked.image is None:
        report("kubernetes.image", None, "has to name an image with this very Shoal", "provider")
    _check_storage(cluster, report)
    if asked.store is not None:
        _check_store(asked.store, report)
    gateway = cluster.gateway
    if not gateway.has_front and gateway.count not in (1, "all"):
        message = (
            "should be 1 or all in pods with `gateway.front: none`: a Service cannot tell which pods have one"
        )
        report("gateway.count", gateway.count, message, "gateway.front")
    kinds = {kind.name: kind for kind in cluster.nodes[1:]}
    for name, most in asked.autoscaler.most.items() if asked.autoscaler is not None else ():
        key = f"kubernetes.autoscaler.most.{name}"
        if name not in kinds:
            report(key, most, f"is no kind of node but the head; there are: {', '.join(kinds)}", "nodes")
        elif most < kinds[name].count:
            report(key, most, f"should be at least the count of {name}, {kinds[name].count}", "nodes")
    for place, each in enumerate(asked.tolerations):
        if each.operator == "Equal" and (each.key is None or each.value is None):
            message = "needs `key` and `value`, or `operator: Exists`"
            report(f"kubernetes.tolerations.{place}", None, message)
        elif each.operator == "Exists" and each.value is not None:
            message = "has no `value` with `operator: Exists`"
            report(f"kubernetes.tolerations.{place}.value", each.value, message)
    for section, own in (("pod", OWN_OF_PODS), ("container", OWN_OF_CONTAINERS)):
        for key in getattr(asked, section):
            if key in own:
                report(f"kubernetes.{section}.{key}", None, "is said by Shoal itself")


def _check_names(cluster: ClusterConfig, report: MistakeReport) -> None:
    if _LABEL.fullmatch(cluster.name) is None or len(cluster.name) > MOST_LETTERS:
        message = f"should be lower-case letters, digits and `-`, from a letter on, at most {MOST_LETTERS}"
        report("name", cluster.name, f"{message}, with `provider: kubernetes`", "provider")
    for index, kind in enumerate(cluster.nodes):
        if _LABEL.fullmatch(kind.name) is None:
            message = "should be lower-case letters, digits and `-`, from a letter on"
            report(f"nodes.{index}.name", kind.name, f"{message}, with `provider: kubernetes`", "provider")
        if kind.accelerator is not None and re.fullmatch(LABEL_VALUE, kind.accelerator, re.ASCII) is None:
            message = "should be the value of a label of Kubernetes'"
            report(f"nodes.{index}.accelerator", kind.accelerator, message, "provider")
    if cluster.nodes[0].count != 1:
        report("nodes.0.count", cluster.nodes[0].count, "should be 1: the first node is the head")


def _check_storage(cluster: ClusterConfig, report: MistakeReport) -> None:
    path, claim = local_path(cluster.storage), cluster.kubernetes.storage_claim
    if path is None and claim is not None:
        message = "is for a storage that is a path, at which all pods mount it"
        report("kubernetes.storage_claim", claim, message, "storage")
    elif path is not None and claim is None:
        message = "is a path: kubernetes.storage_claim has to say what all pods mount there"
        report("storage", cluster.storage, message, "kubernetes.storage_claim", "provider")
    elif path is not None and os.path.isabs(cluster.storage) and os.path.normpath(cluster.storage) == "/":
        report("storage", cluster.storage, "cannot be the root of a pod's files", "provider")


def _check_store(store: StoreConfig, report: MistakeReport) -> None:
    if store.backend == "redis":
        if store.address is None:
            report("kubernetes.store.address", None, "has to say where Redis is (HOST:PORT)")
        others = {"size": store.size, "claim": store.claim}
    else:
        others = {"address": store.address, "password_secret": store.password_secret}
        if store.size is not None and store.claim is not None:
            report("kubernetes.store.size", store.size, "is for a volume that is made, and not with `claim`")
    for key, value in others.items():
        if value is not None:
            report(f"kubernetes.store.{key}", value, f"is not for `backend: {store.backend}`")
