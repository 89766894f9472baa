"""The fake engine, which notes what it has; see `notes`."""

from __future__ import annotations

from tests.serve_apps.fake_engine import FakeEngine, follow
from tests.serve_apps.notes import Noting

__all__ = ["Engine", "follow"]


class Engine(Noting, FakeEngine):
    """Implements serve_apps.engine.protocol.Engine without a model."""
