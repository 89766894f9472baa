"""A running cluster, seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import psutil
import pytest

from tests.clusters import LiveCluster


def test_status_tells_the_nodes_of_the_config(running_cluster: LiveCluster) -> None:
    done = running_cluster.shoal("status", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"name", "address", "dashboard_url", "nodes", "leases", "jobs", "apps"}
    assert document["name"] == running_cluster.record.name
    assert [(node["name"], node["head"], node["resources"].get("CPU", 0)) for node in document["nodes"]] == [
        ("head", True, 0),
        ("worker-1", False, 2),
        ("worker-2", False, 2),
    ]
    assert all(node["alive"] for node in document["nodes"])
