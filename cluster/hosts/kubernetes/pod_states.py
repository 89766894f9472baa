"""What the pods of a cluster wait for, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CRASHES = ("CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True)
class PodState:
    """How a pod stands.

    Attributes:
        problem: why it does not run, in a sentence; empty where it runs, or nobody says.
        hopeless: without a change it will not.
    """

    name: str
    ready: bool
    is_head: bool
    problem: str = ""
    hopeless: bool = False


def state_of(pod: Mapping[str, Any]) -> PodState:
    """That of a pod, as `kubectl get pod -o json` has it."""
    name, status = str(pod["metadata"]["name"]), pod.get("status", {})
    labels = pod["metadata"].get("labels", {})
    is_head = labels.get("ray.io/node-type") == "head"
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    if conditions.get("Ready", {}).get("status") == "True":
        return PodState(name, True, is_head)
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    for container in containers:
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _NO_IMAGE:
            problem = f"{name}: its image {container.get('image', '')} cannot be pulled ({reason})"
            return PodState(name, False, is_head, _with(problem, message), hopeless=True)
        if reason in _CRASHES:
            ended = container.get("lastState", {}).get("terminated", {})
            code = f", with exit code {ended['exitCode']}" if "exitCode" in ended else ""
            problem = f"{name}: its container ends again and again{code} ({reason})"
            if reason != "CrashLoopBackOff":
                problem = f"{name}: its container cannot be made ({reason})"
            return PodState(name, False, is_head, _with(problem, message), hopeless=True)
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        problem = f"{name} waits for a machine: {scheduled.get('message', scheduled.get('reason', ''))}"
        return PodState(name, False, is_head, problem)
    return PodState(name, False, is_head)


def problems_of(cluster: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What keeps KubeRay from making pods: of its RayCluster, and of events about it (quotas, rights)."""
    status = cluster.get("status", {})
    found = [str(status["reason"])] if status.get("state") == "failed" and status.get("reason") else []
    for condition in status.get("conditions", ()):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            found.append(str(condition.get("message", condition.get("reason", ""))))
    for event in events:
        if event.get("type") == "Warning" and str(event.get("reason", "")).startswith("FailedToCreate"):
            found.append(str(event.get("message", event["reason"])))
    return list(dict.fromkeys(found))


def _with(problem: str, message: str) -> str:
    return f"{problem}: {message}" if message else problem
