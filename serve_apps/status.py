"""Which apps run, and as what."""

from __future__ import annotations

from typing import Any

from serve_apps.controller.client import ControllerClient

_OWN = ("spec", "settled")
"""What the controller tells beside the row."""


def app_statuses() -> list[dict[str, Any]]:
    """One row an app; needs a connection to the cluster.

    name, model, status (deploying, running, idle, updating, holding, going_back, unhealthy, deleting),
    replicas (that run), wanted, granted, engine, tensor; rollout: how the last one stands or ended (number,
    strategy, from_version, to_version, status: running, succeeded, failed or rolled_back, reason, seconds,
    pause_s); events: the last of them.
    """
    controller = ControllerClient.find()
    if controller is None:
        return []
    rows = controller.describe().values()
    return [{key: value for key, value in row.items() if key not in _OWN} for row in rows]
