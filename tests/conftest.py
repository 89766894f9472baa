"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

from tests import clusters

# In the background of a script pytest, and whatever it starts, is deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_contexts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whoever runs the tests may use clusters of others; the tests do not."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    os.environ.pop("SHOAL_CONTEXT", None)


@pytest.fixture(scope="module", autouse=True)
def the_past_is_left_alone() -> Iterator[None]:
    """What a module leaves behind is not looked through by later collections of garbage.

    FastAPI keeps much of every application for ever: after hundreds of gateways each collection took seconds.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.LiveCluster]:
    """One cluster for all tests that need one: a head without CPUs, two nodes of two, its own storage.

    It is down at the end, and nothing of it may be left. Tests leave it as they found it.
    """
    with clusters.started(tmp_path_factory.mktemp("cluster")) as live:
        yield live
