"""A disk on which there is no room for what is large."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_small_files(most_bytes: int) -> Iterator[None]:
    """Neither this process nor one that it starts meanwhile can write a file that is longer: a write beyond
    that is cut short, as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
