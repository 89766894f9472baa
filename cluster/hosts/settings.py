"""Ray's settings for what is Shoal's, wherever its nodes come from."""

from __future__ import annotations

import os

from cluster.state.health import CERTIFICATES, USE_TLS

SERVE_SETTINGS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""Settings of Ray Serve from its performance guide; whoever calls `up` may set others. Event loops in threads
of one process wait for one another, and ours do nothing that takes long."""

JOB_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
JOB_STOP_WAIT_S = 120
"""Between SIGTERM and SIGKILL of a job's driver. Ray's own 3 s are less than a checkpoint takes."""

STARTS_AT_ONCE = "RAY_worker_maximum_startup_concurrency"
"""Processes that a node starts at the same time, see `starts_at_once`."""
LEAST_AT_ONCE = 4

TENANTS_VARIABLE = "SHOAL_TENANTS"
"""Names the place, a path or a URI, of what is kept of jobs and apps where nodes go and come back."""

ANOTHER_CLUSTERS = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_DASHBOARD_ADDRESS",
    "RAY_AGENT_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_NAMESPACE",
    "RAY_TMPDIR",
    "RAY_RUNTIME_ENV",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_JOB_ID",
    USE_TLS,
    *CERTIFICATES,
)
"""Variables that would tie new nodes to whatever cluster the caller's shell points at."""


def starts_at_once() -> dict[str, str]:
    """The setting of how many processes a node of this machine starts at once.

    Ray's own is as many as the node has CPUs: a head without any starts them one after the other, drivers,
    brokers and controllers alike.
    """
    return {STARTS_AT_ONCE: str(max(LEAST_AT_ONCE, os.cpu_count() or 1))}
