"""What Serve says of its applications: whether they run, with how many replicas, and why one failed."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_apps.spec import DEPLOYMENT, GATEWAY

MAKING_CONFIGS = threading.Lock()
"""Held while Serve makes configs, those of its status included: with each it pickles the class of a request
router, and to do so marks a module in a table of the whole process."""
LINES = 30
"""How much of what Serve says about a failure is handed on."""
_OUR_ERROR = re.compile(r"^(?:serve_apps|cluster)(?:\.\w+)+: ", re.MULTILINE)
"""How the line of a traceback begins that tells of an error of Shoal's own."""
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Served:
    """One application, as Serve tells of it."""

    status: str
    """Serve's, in lower case: deploying, running, unhealthy, deploy_failed, deleting."""
    ready: int
    failure: str | None
    """Why it could not be started."""


def look() -> dict[str, Served]:
    """The applications that Serve has, the gateway's left out."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus, ReplicaState

    found = {}
    with MAKING_CONFIGS:
        status = serve.status()
    for name, overview in status.applications.items():
        if name == GATEWAY:
            continue
        deployment = overview.deployments.get(DEPLOYMENT)
        ready = deployment.replica_states.get(ReplicaState.RUNNING, 0) if deployment else 0
        failed = overview.status == ApplicationStatus.DEPLOY_FAILED
        found[name] = Served(overview.status.value.lower(), ready, reason(overview) if failed else None)
    return found


def reason(overview: Any) -> str:
    """Why an application failed, from what Serve says about it and its deployments.

    An error of Shoal's own says all by itself; of another the end of its traceback is handed on.
    """
    deployments: Mapping[str, Any] = overview.deployments
    messages = [overview.message, *(each.message for each in deployments.values())]
    text = "\n".join(dict.fromkeys(m.strip() for m in messages if m.strip()))
    *_, said = _OUR_ERROR.split(text)
    if _TRACEBACK not in said:
        # Nothing came after it, so that it is what the replica ended with.
        text = said
    return "\n".join(text.splitlines()[-LINES:]) or f"status {overview.status.value}"
