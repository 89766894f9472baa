"""A gateway with keys, from the command line: who has none gets nothing, and new keys count at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.clusters import HEAD_AND_TWO, LiveCluster, shoal, started
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
        assert_tenants_share_no_cache(cluster, url)
        # A file that is wrong for a moment locks nobody out.
        whole = (directory / "keys.yaml").read_text()
        (directory / "keys.yaml").write_text("- [")
        time.sleep(2)
        assert status_of(key) in (200, 429), "it is known; its minute may be over"
        (directory / "keys.yaml").write_text(whole)
        # The command line needs no key.
        (row,) = json.loads(cluster.shoal("status", "--json").stdout)["apps"]
        assert (row["name"], row["model"], row["replicas"]) == ("chat", "model", 1)
        assert cluster.shoal("serve", "chat", "--json").returncode == 0
        assert shoal("unserve", "chat", "-f", str(path)).returncode == 0


def assert_tenants_share_no_cache(cluster: LiveCluster, url: str) -> None:
    """By the engine's own count of the tokens that it did not have to read."""
    keys = {
        tenant: cluster.shoal("key", tenant, *more).stdout.strip()
        for tenant, more in (("one", ()), ("two", ()), ("ops", ("--metrics", "--app", "none")))
    }
    body = {"model": "chat", "prompt": list(range(5, 69)), "max_tokens": 2}

    def read() -> tuple[float, float]:
        """Tokens of prompts that the engine took in, and those of them that it found."""
        headers = {"authorization": f"Bearer {keys['ops']}"}
        page = httpx.get(url.removesuffix("/v1") + "/metrics", headers=headers, timeout=30)
        if page.status_code != 200:
            return -1.0, -1.0  # the gateway has not read the new keys yet
        values = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if line[0] != "#")
        names = ("shoal_engine_prompt_tokens_total", "shoal_engine_prefix_cache_hit_tokens_total")
        taken, found = (float(values[f'{name}{{app="chat"}}']) for name in names)
        return taken, found

    def found_for(tenant: str) -> float:
        wait_for(lambda: read()[0] >= 0)
        taken, found = read()
        headers = {"authorization": f"Bearer {keys[tenant]}"}
        answer = httpx.post(f"{url}/completions", json=body, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        wait_for(lambda: read()[0] == taken + 64)
        return read()[1] - found

    assert [found_for(tenant) > 0 for tenant in ("one", "two", "one", "two")] == [False, False, True, True]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
