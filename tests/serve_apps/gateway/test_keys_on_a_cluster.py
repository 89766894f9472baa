"""A gateway with keys, from the command line: who has none gets nothing, and new keys count at once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from tests.clusters import HEAD_AND_TWO, shoal, started
from tests.serve_apps.tiny_model import make_model

pytestmark = pytest.mark.slow


def test_keys_open_the_gateway_of_a_running_cluster(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    directory.mkdir()
    (directory / "keys.yaml").write_text("")
    make_model(tmp_path / "model")
    with started(directory, *HEAD_AND_TWO, "gateway: {keys: keys.yaml}") as cluster:
        path = cluster.config_path
        path.write_text(f"{path.read_text()}serve_apps:\n  chat: {{model: {tmp_path / 'model'}}}\n")
        served = cluster.shoal("serve", "--json")
        assert served.returncode == 0, served.stderr
        url = json.loads(served.stdout)["base_url"]
        body = {"model": "chat", "prompt": "a", "max_tokens": 2}

        def status_of(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/completions", json=body, headers=headers, timeout=30).status_code

        assert httpx.post(f"{url}/completions", json=body, timeout=30).status_code == 401
        assert httpx.get(url.removesuffix("/v1") + "/apps", timeout=30).status_code == 401
        made = cluster.shoal("key", "ours", "--requests-per-minute", "2")
        assert made.returncode == 0, made.stderr
        key = made.stdout.strip()
        deadline = time.monotonic() + 10
        while (status := status_of(key)) == 401 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [status, status_of(key), status_of(key)] == [200, 200, 429]
        # A file that is wrong for a moment locks nobody out.
        whole = (directory / "keys.yaml").read_text()
        (directory / "keys.yaml").write_text("- [")
        time.sleep(2)
        assert status_of(key) == 429
        (directory / "keys.yaml").write_text(whole)
        # The command line needs no key.
        (row,) = json.loads(cluster.shoal("status", "--json").stdout)["apps"]
        assert (row["name"], row["model"], row["replicas"]) == ("chat", "model", 1)
        assert cluster.shoal("serve", "chat", "--json").returncode == 0
        assert shoal("unserve", "chat", "-f", str(path)).returncode == 0
