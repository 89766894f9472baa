"""Which Shoal this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The version of the installed project."""
    try:
        return importlib.metadata.version("shoal")
    except importlib.metadata.PackageNotFoundError:
        return "(run from its sources, not installed)"
