"""Which apps run, and as what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.state.nodes import node_names
from serve_apps.controller.client import ControllerClient
from serve_apps.spec import node_of

_OWN = ("spec", "settled")
"""What the controller tells beside the row."""


def serve_status(url: str) -> dict[str, Any]:
    """How Serve itself is; needs a connection to the cluster.

    url: where its own proxy listens, which answers for applications that are not Shoal's; status: running,
    starting, ending (somebody shuts it down), silent, or unknown (Shoal serves nothing, and others may);
    proxies: how each of its proxies is (starting, healthy, unhealthy, draining); note: why it is away, in a
    sentence; gateways: of each `node`, `url` (None: it is not reached now) and `failure` (why it could not be
    started); front: how what stands before them is (`runs`, `failure`); None where there is none.

    Args:
        url: where its proxy listens, or will, unless whoever has started it said otherwise.
    """
    controller = ControllerClient.find()
    if controller is None:
        nothing: dict[str, Any] = {"gateways": [], "front": None}
        return {"url": url, "status": "unknown", "proxies": [], "note": None, **nothing}
    serving = controller.serving()
    note = serving["note"] or serving["failure"]
    front = serving["front"]
    return {
        "url": serving["url"] or url,
        "status": serving["status"],
        "proxies": serving["proxies"],
        "note": note,
        "gateways": _gateways(serving),
        "front": front and {"runs": front["runs"], "failure": front["failure"]},
    }


def _gateways(serving: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = node_names()
    failed = {node_of(gateway): why for gateway, why in serving["gateway_failures"].items()}
    reached = {each["node"]: each["url"] for each in serving["gateways"]}
    rows = [
        {"node": names.get(node, node), "url": reached.get(node), "failure": failed.get(node)}
        for node in {**reached, **failed}
    ]
    return sorted(rows, key=lambda row: str(row["node"]))


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
