"""How the storage's locations are read, and its errors put in words."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from cluster.errors import RequestError

SCHEMES = "file, s3, gs, hdfs, abfs"
GCS_RETRY_S = 60


def read_location(text: str) -> tuple[Path | None, str, str]:
    """A local directory, made absolute; else a URI, and the options after its `?`.

    Raises:
        RequestError: it is neither.
    """
    if not text.strip() or "\0" in text:
        raise RequestError(f"storage: {text!r} is neither a path nor a URI ({SCHEMES})")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/|(file):", text)
    if scheme is None and "://" not in text:
        return Path(os.path.abspath(os.path.expanduser(text))), "", ""
    if scheme is not None and "file" in scheme.groups():
        return local_path_of(text), "", ""
    before, mark, after = text.partition("://")
    after, _, query = after.partition("?")
    if not mark or not after.strip("/"):
        raise RequestError(f"storage {text}: :// and a bucket or host must follow the scheme")
    return None, f"{before}://{after.rstrip('/')}", query


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
