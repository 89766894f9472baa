"""The files of a directory of a storage on this machine, for libraries that open them by their path."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.files.storage import Storage


@contextmanager
def files_here(directory: Storage, *, without: str | None = None) -> Iterator[Path]:
    """The directory itself where that is here, else a copy of it during the `with`: for what is small.

    Args:
        without: files whose names end so are not copied.
    """
    local = directory.local_path()
    if local is not None:
        yield local
        return
    left_out = [name for name in directory.files() if without is not None and name.endswith(without)]
    with tempfile.TemporaryDirectory() as above:
        copy = Path(above, "files")
        Storage(copy).copy_dir(directory, skip=left_out)
        yield copy
