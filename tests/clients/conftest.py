"""A cluster that serves the taught model, for all clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import taught_model
from tests.clients.environments import clients_directory, made_once
from tests.clients.served import APP
from tests.clusters import LiveCluster, shoal


@pytest.fixture(scope="session")
def taught() -> Path:
    """The taught model's directory; it is kept for later runs until the lesson or the teaching changes."""
    folder = clients_directory() / "taught-model"
    return made_once(folder, taught_model.digest(), taught_model.teach)


@pytest.fixture(scope="session")
def base_url(
    running_cluster: LiveCluster, taught: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Where `fish` is served: the taught model, by the command line's `serve`."""
    path = tmp_path_factory.mktemp("clients") / "shoal.yaml"
    cluster = running_cluster.config_path.read_text().replace("./", f"{running_cluster.config_path.parent}/")
    app = f"{{model: {taught}, kv_cache: {{memory_gib: 0.5}}, limits: {{batch: 8}}}}"
    path.write_text(f"{cluster}serve_apps:\n  {APP}: {app}\n")
    done = shoal("serve", APP, "--json", "-f", str(path))
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)["base_url"]
    done = shoal("unserve", APP, "--json", "-f", str(path))
    assert done.returncode == 0, done.stderr
