"""Directories that libraries open by their path, wherever they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import RequestError
from cluster.node.cache import NodeCache

if TYPE_CHECKING:
    from cluster.files.storage import Storage


def is_uri(location: str) -> bool:
    """Whether a place of the config is a URI and no path."""
    return "://" in location


def directory_here(location: str, cache: Path | None = None) -> str:
    """The path of a directory: itself, or the copy that this node keeps of one that a URI names.

    It is fetched once a node, and again when its files have changed.

    Args:
        cache: where copies are kept; the user's own cache by default.

    Raises:
        RequestError: nothing is there.
        ShoalError: it cannot be read.
    """
    if not is_uri(location):
        return location
    from cluster.files.storage import Storage  # pyarrow takes a while

    storage = Storage(location)
    local = storage.local_path()
    if local is not None:
        return str(local)
    state = _state_of(storage)
    if not state:
        raise RequestError(f"there is no directory {location}, or it is empty")
    name = hashlib.sha256("\n".join([location, *state]).encode()).hexdigest()[:32]
    kept = NodeCache(cache or Path.home() / ".cache" / "shoal" / "directories")
    return str(kept.get(name, lambda staged: storage.download_dir("", staged)))


def _state_of(storage: Storage) -> list[str]:
    """What changes when a file of the directory does: names, sizes and times."""
    from pyarrow import fs

    filesystem, directory = storage.pyarrow()
    selector = fs.FileSelector(directory, allow_not_found=True, recursive=True)
    found = filesystem.get_file_info(selector)
    return sorted(f"{each.path} {each.size} {each.mtime_ns}" for each in found if each.is_file)
