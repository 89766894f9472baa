"""What Serve says of its applications: whether they run, with how many replicas, and why one failed."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_apps.replica.serve_private import ServeInstance, find_serve
from serve_apps.spec import DEPLOYMENT, GATEWAY, is_gateway

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


@dataclass(frozen=True)
class ServeSeen:
    """Serve, as of one look."""

    instance: ServeInstance | None = None
    """None: it does not run."""
    applications: Mapping[str, Served] = field(default_factory=dict)
    """Those of gateways left out."""
    gateways: Mapping[str, Served] = field(default_factory=dict)
    """By Serve application."""
    proxies: tuple[str, ...] = ()
    """How each of its HTTP proxies is, in Serve's words, in lower case."""


def look() -> ServeSeen:
    """What Serve runs now, whichever Serve that is.

    Raises:
        RayError, RayServeException: it does not answer, or is ending at this moment.
    """
    from ray import serve

    instance = find_serve()
    if instance is None:
        return ServeSeen()
    with MAKING_CONFIGS:
        status = serve.status()
    found = {
        name: _served(overview, GATEWAY if is_gateway(name) else DEPLOYMENT)
        for name, overview in status.applications.items()
    }
    gateways = {name: found.pop(name) for name in list(found) if is_gateway(name)}
    proxies = tuple(each.value.lower() for each in status.proxies.values())
    return ServeSeen(instance, found, gateways, proxies)


def _served(overview: Any, deployment: str) -> Served:
    from ray.serve.schema import ApplicationStatus, ReplicaState

    found = overview.deployments.get(deployment)
    ready = found.replica_states.get(ReplicaState.RUNNING, 0) if found else 0
    failed = overview.status == ApplicationStatus.DEPLOY_FAILED
    return Served(overview.status.value.lower(), ready, reason(overview) if failed else None)


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
