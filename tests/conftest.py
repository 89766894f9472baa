"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import clusters


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.LiveCluster]:
    """One cluster for all tests that need one: a head without CPUs, two nodes of two, its own storage.

    It is down at the end, and nothing of it may be left. Tests leave it as they found it.
    """
    with clusters.started(tmp_path_factory.mktemp("cluster")) as live:
        yield live
