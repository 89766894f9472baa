"""Which apps run, and as what."""

from __future__ import annotations

from typing import Any

from serve_apps.controller.client import ControllerClient

_OWN = ("spec", "settled")
"""What the controller tells beside the row."""


def serve_status(url: str) -> dict[str, Any]:
    """How Serve itself is; needs a connection to the cluster.

    url: where its own proxy listens, which answers for applications that are not Shoal's; status: running,
    starting, ending (somebody shuts it down), silent, or unknown (Shoal serves nothing, and others may);
    proxies: how each of its proxies is (starting, healthy, unhealthy, draining); note: why it is away, in a
    sentence.

    Args:
        url: where its proxy listens, or will, unless whoever has started it said otherwise.
    """
    controller = ControllerClient.find()
    if controller is None:
        return {"url": url, "status": "unknown", "proxies": [], "note": None}
    serving = controller.serving()
    note = serving["note"] or serving["failure"]
    found = {"url": serving["url"] or url, "status": serving["status"], "proxies": serving["proxies"]}
    return {**found, "note": note}


def app_statuses() -> list[dict[str, Any]]:
    """One row an app; needs a connection to the cluster.

    name, model, status (deploying, running, idle, updating, holding, going_back, unhealthy, deleting),
    replicas (that run), wanted, granted, engine, tensor; note: why Serve is away, where it is; rollout: how
    the last one stands or ended (number, strategy, from_version, to_version, status: running, succeeded,
    failed or rolled_back, reason, seconds, pause_s); events: the last of them.
    """
    controller = ControllerClient.find()
    if controller is None:
        return []
    rows = controller.describe().values()
    return [{key: value for key, value in row.items() if key not in _OWN} for row in rows]
