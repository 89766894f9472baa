from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train_jobs.fork_server import Server
from train_jobs.group.job_agents import PRELOADED


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One for all: what takes it seconds is to import."""
    started = Server(*PRELOADED)
    yield started
    started.close()
