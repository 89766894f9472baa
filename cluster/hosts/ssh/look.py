"""Looks at a host before anything is started there. Its text is sent to the host's Python, which may have
nothing of ours, and may be old: nothing but the standard library is imported, and no new syntax is used."""

import json
import os
import shutil
import sys
import tempfile


def versions() -> "dict[str, str | None]":
    """The versions of what has to be the same on all hosts, None for what is not installed."""
    try:
        from importlib import metadata
    except ImportError:  # before Python 3.8
        return {}
    found = {}  # type: dict[str, str | None]
    for name in ("shoal", "ray", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def look() -> "dict[str, object]":
    """Facts of this host: `python` (major, minor, micro), `executable`, `versions`, `home`, `address` (where
    the connection arrived), `temporary` (the directory of temporary files), `free_bytes` (there),
    `unwritable` (why nothing can be written there, else None)."""
    temporary = tempfile.gettempdir()
    unwritable = None
    try:
        with tempfile.TemporaryFile(dir=temporary) as file:
            file.write(b"0" * 65536)
            file.flush()
    except OSError as error:
        unwritable = error.strerror
    return {
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "versions": versions(),
        "home": os.path.expanduser("~"),
        "address": os.environ["SSH_CONNECTION"].split()[2],
        "temporary": temporary,
        "free_bytes": shutil.disk_usage(temporary).free,
        "unwritable": unwritable,
    }


if __name__ == "__main__":
    print("shoal-result " + json.dumps(look()))
