"""The torch engine, which notes what it has; see `notes`."""

from __future__ import annotations

from serve_apps.engine.torch_engine.engine import TorchEngine
from serve_apps.engine.torch_engine.follower import follow
from tests.serve_apps.notes import Noting

__all__ = ["Engine", "follow"]


class Engine(Noting, TorchEngine):
    """Implements serve_apps.engine.protocol.Engine."""
