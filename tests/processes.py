"""Processes that tests have started, by what they were started with."""

from __future__ import annotations

from contextlib import suppress

import psutil


def children_with(words: str, parent: int | None = None, *, recursive: bool = False) -> list[psutil.Process]:
    """The live children of a process, or of this one, that have these words in their command line; with
    `recursive` theirs too."""
    found = []
    for each in psutil.Process(parent).children(recursive):
        with suppress(psutil.Error):  # it has ended, and perhaps nobody has waited for it
            if words in " ".join(each.cmdline()):
                found.append(each)
    return found
