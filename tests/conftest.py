"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests import clusters

# In the background of a script pytest, and whatever it starts, is deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.LiveCluster]:
    """One cluster for all tests that need one: a head without CPUs, two nodes of two, its own storage.

    It is down at the end, and nothing of it may be left. Tests leave it as they found it.
    """
    with clusters.started(tmp_path_factory.mktemp("cluster")) as live:
        yield live
