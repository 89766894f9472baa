"""How the storage's locations are read, and its errors put in words."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from cluster.errors import RequestError

GCS_RETRY_S = 60


def local_path_of(uri: str) -> Path:
    try:
        return Path(fs.FileSystem.from_uri(uri)[1])
    except (pa.ArrowInvalid, ValueError) as error:
        raise RequestError(
            f"storage {uri}: not a file URI (file:///absolute/path): {reason(error)}"
        ) from error


def bounded(uri: str, query: str) -> str:
    """The whole URI; Google's client gets a limit to its retries (it is 15 minutes otherwise)."""
    if uri.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in query:
        query = f"{query}&retry_limit_seconds={GCS_RETRY_S}".lstrip("&")
    return f"{uri}?{query}" if query else uri


def reason(error: BaseException) -> str:
    """The first line of an error, as the end of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
