"""Where the config file is, and what stands in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cluster.config.reading.positions import shorten
from cluster.errors import ConfigError, Mistake

FILE_NAME = "shoal.yaml"
FILE_VARIABLE = "SHOAL_CONFIG"
MAX_BYTES = 1024 * 1024


def find_config(file: str | None = None) -> Path:
    """The config file: `file`, else $SHOAL_CONFIG, else shoal.yaml here or in a parent directory.

    Raises:
        ConfigError: no file was named and there is none.
    """
    named = file if file is not None else os.environ.get(FILE_VARIABLE) or None
    if named is not None:
        return Path(named)
    if os.path.lexists(FILE_NAME):
        return Path(FILE_NAME)
    try:
        here = Path.cwd()
    except OSError as error:
        raise whole_file(FILE_NAME, f"the current directory cannot be read ({error.strerror})") from error
    for directory in here.parents:
        if os.path.lexists(directory / FILE_NAME):
            return directory / FILE_NAME
    raise whole_file(
        FILE_NAME,
        "there is no such file here or in a parent directory; `shoal init` writes one, -f names another",
    )


def read_config(path: Path, file: str) -> str:
    """The text of a config file.

    Args:
        file: what it is called in messages.

    Raises:
        ConfigError: it cannot be read, or is no file of text.
    """
    try:
        return _decode(_read_bytes(path, file), file)
    except OSError as error:
        raise whole_file(file, f"cannot be read ({error.strerror or error})") from error


def _read_bytes(path: Path, file: str) -> bytes:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise whole_file(file, "there is no such file; `shoal init` writes one") from error
    except ValueError as error:
        raise whole_file(shorten(file), "is no name a file can have") from error
    if stat.S_ISDIR(status.st_mode):
        inside = path / FILE_NAME
        hint = f"; did you mean {inside}?" if inside.is_file() else "; name a file"
        raise whole_file(file, "is a directory" + hint)
    if not stat.S_ISREG(status.st_mode):
        raise whole_file(file, "is not a regular file")
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise whole_file(file, f"is larger than {MAX_BYTES} bytes (1 MiB); a config is smaller")
    return data


def _decode(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        message = f"is not UTF-8 text (the byte 0x{data[error.start]:02x} does not belong there)"
        raise ConfigError([Mistake(file, line, column, "", None, message)]) from error


def whole_file(file: str, message: str) -> ConfigError:
    """A mistake that has no place in the file."""
    return ConfigError([Mistake(file, None, None, "", None, message)])
