"""What pods wait for, told from what kubectl prints of them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.hosts.kubernetes.pod_states import PodState, problems_of, state_of


def pod(**status: Any) -> dict[str, Any]:
    labels = {"ray.io/node-type": "worker"}
    return {"metadata": {"name": "lab-gpu-1", "labels": labels}, "status": status}


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"containerStatuses": [{"image": "shoal:1", "state": state, **more}]}


@pytest.mark.parametrize(
    ("status", "problem", "hopeless"),
    [
        ({}, "", False),
        ({"conditions": []}, "", False),
        (waiting("ContainerCreating"), "", False),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "shoal:1"'),
            "lab-gpu-1: its image shoal:1 cannot be pulled (ImagePullBackOff): Back-off pulling image"
            ' "shoal:1"',
            True,
        ),
        (
            waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 2}}),
            "lab-gpu-1: its container ends again and again, with exit code 2 (CrashLoopBackOff)",
            True,
        ),
        (
            waiting("CreateContainerConfigError", 'secret "lab-env" not found'),
            "lab-gpu-1: its container cannot be made (CreateContainerConfigError): secret"
            ' "lab-env" not found',
            True,
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    }
                ]
            },
            "lab-gpu-1 waits for a machine: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            False,
        ),
    ],
)
def test_what_a_pod_waits_for(status: dict[str, Any], problem: str, hopeless: bool) -> None:
    assert state_of(pod(**status)) == PodState("lab-gpu-1", False, False, problem, hopeless)


def test_a_pod_that_is_ready_has_no_problem() -> None:
    status = {**waiting("CrashLoopBackOff"), "conditions": [{"type": "Ready", "status": "True"}]}
    assert state_of(pod(**status)) == PodState("lab-gpu-1", True, False)


def test_a_pod_of_which_nobody_has_said_anything_is_not_ready() -> None:
    head = {"metadata": {"name": "lab-head", "labels": {"ray.io/node-type": "head"}}}
    assert state_of(head) == PodState("lab-head", False, True)


def test_why_there_are_no_pods_is_told_once() -> None:
    quota = 'pods "lab-head" is forbidden: exceeded quota: gpus'
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": quota}
    events = [
        {"type": "Warning", "reason": "FailedToCreateHeadPod", "message": quota},
        {"type": "Warning", "reason": "FailedToCreateWorkerPod", "message": "no rights"},
        {"type": "Normal", "reason": "CreatedHeadPod", "message": "made"},
        {"type": "Warning", "reason": "Unhealthy", "message": "a probe"},
    ]
    assert problems_of({"status": {"conditions": [condition]}}, events) == [quota, "no rights"]
    assert problems_of({}, []) == []
    failed = {"status": {"state": "failed", "reason": "the spec is invalid"}}
    assert problems_of(failed, []) == ["the spec is invalid"]
