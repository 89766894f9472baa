"""What a fork had to import itself, and its node's fork server imports for those that are forked later.

Which family a model is of is known only once somebody has it, and there are hundreds of families. So a fork
says which it has imported, and the first of a family on a node has spared the others that.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
import traceback
from contextlib import suppress

PACKAGES = ("transformers.models.",)
"""Of whose modules it is told: those that only define classes, start no thread and touch no device."""

_teller: int | None = None
"""Where forks of this process say it; None in processes that are no fork of a node's server."""
_known: set[str] = set()
"""What such a fork begins with."""


class SharedImports:
    """The fork server's side; there is one in a process.

    Attributes:
        heard: the descriptor at which forks say what they have imported.
    """

    def __init__(self) -> None:
        global _teller
        self.heard, _teller = os.pipe()
        for descriptor in (self.heard, _teller):
            os.set_blocking(descriptor, False)
        self._tried: set[str] = set()
        _begin_with_these()

    def take(self) -> bool:
        """Import what forks have said; whether there was anything new."""
        said = b""
        with suppress(BlockingIOError):
            while part := os.read(self.heard, select.PIPE_BUF):
                said += part
        names = {name for name in said.decode().split() if name.startswith(PACKAGES)}
        new = sorted(names - sys.modules.keys() - self._tried)
        self._tried |= names
        for name in new:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001  (whoever needs it imports it itself, as before)
                traceback.print_exc()
        _begin_with_these()
        return bool(new)


def tell_imports() -> None:
    """Say, in a fork, what it has imported beside what it began with; nothing happens in other processes."""
    if _teller is None:
        return
    for name in sorted(_here() - _known):
        with suppress(OSError):  # the server has ended, or is busy for long: others import it themselves
            os.write(_teller, f"{name}\n".encode())


def _begin_with_these() -> None:
    global _known
    _known = _here()


def _here() -> set[str]:
    return {name for name in list(sys.modules) if name.startswith(PACKAGES)}
