"""Twenty clusters of two users through one queue, several at a time on the same two nodes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.slurm_hosts import SlurmUser, needs_slurm, slurm_site_of

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.timeout(2400)]

CLUSTERS, AT_ONCE = 20, 3
UP_S = 1800.0


@dataclass
class Stay:
    """A cluster's time on its nodes.

    Attributes:
        ports: of its head, by what listens there.
    """

    name: str
    head: str
    ports: dict[str, int]
    began: float
    ended: float = 0.0


def stay(user: SlurmUser, number: int, together: threading.Barrier) -> Stay:
    """Bring a cluster up, see that it is itself, and take it down."""
    name, file = f"{user.name}-{number}", f"{number}.yaml"
    user.write({"name": name, "slurm": {"nodes": 2, "cpus_per_node": 2}}, file)
    up: dict[str, Any] = user.document("up", file=file, timeout_s=UP_S)
    began = time.monotonic()
    assert up["name"] == name
    assert [node["alive"] for node in up["nodes"]] == [True, True]
    urls = dict(
        line.removeprefix("export ").split("=", 1)
        for line in user.shoal("env", file=file).stdout.splitlines()
    )
    ports = {
        "gcs": int(up["address"].rpartition(":")[2]),
        "dashboard": urlsplit(up["dashboard_url"]).port or 0,
        "api": urlsplit(urls["SHOAL_API_URL"]).port or 0,
        "gateway": urlsplit(urls["SHOAL_BASE_URL"]).port or 0,
        "serve": urlsplit(urls["SHOAL_SERVE_URL"]).port or 0,
    }
    (head,) = [node["name"] for node in up["nodes"] if node["head"]]
    found = Stay(name, head, ports, began)
    with suppress(threading.BrokenBarrierError):  # all that fit are up at once, but perhaps the last
        together.wait(timeout=120)
    for node in user.site.nodes:
        for log in node.file("/tmp").glob(f"shoal-*/@{name}/ray/session_*/logs/*"):
            if log.is_file():
                said = log.read_text(errors="replace").lower()
                assert "address already in use" not in said, f"{log}: a port was taken twice"
    status = user.document("status", file=file)
    assert (status["name"], status["address"]) == (name, up["address"])
    found.ended = time.monotonic()
    assert user.document("down", file=file) == {"name": name, "stopped": True}
    return found


def test_clusters_of_two_users_share_nodes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with slurm_site_of(tmp_path, 2, users=("ann", "bob"), cpus=2 * AT_ONCE) as site:
        users = [SlurmUser(site, tmp_path / "homes", name) for name in ("ann", "bob")]
        together = threading.Barrier(AT_ONCE)
        with ThreadPoolExecutor(CLUSTERS) as side_by_side:
            stays = list(
                side_by_side.map(lambda number: stay(users[number % 2], number, together), range(CLUSTERS))
            )
        pairs = [
            (one, other)
            for place, one in enumerate(stays)
            for other in stays[:place]
            if one.head == other.head and one.began < other.ended and other.began < one.ended
        ]
        of_two_users = sum(one.name[:3] != other.name[:3] for one, other in pairs)
        print(f"{len(pairs)} pairs of clusters were up at once with one head, {of_two_users} of two users")
        assert of_two_users >= AT_ONCE
        for one, other in pairs:
            assert not set(one.ports.values()) & set(other.ports.values()), f"{one} and {other}"
        print(Counter(port for each in stays for port in each.ports.values()))
        assert users[0].slurm("squeue", "--noheader") == ""
        left = set().union(*(node.names() for node in site.nodes)) - {"munged", "slurmd"}
        assert left == set()
        for node in site.nodes:
            assert not [path for path in node.file("/tmp").rglob("*") if re.search(r"/@", str(path))]
        for user in users:
            assert list((user.home / ".local/state").iterdir()) in ([], [user.home / ".local/state/shoal"])
