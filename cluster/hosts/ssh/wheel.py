"""This very Shoal as a wheel, from what is installed here; editable or not."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.errors import ShoalError

PROJECT = "shoal"
PACKAGES = ("cluster", "train_jobs", "serve_apps", "infra")
_NOT_SHIPPED = {"__pycache__"}
_TIME = (1980, 1, 1, 0, 0, 0)
"""Of every file: the same sources make the same wheel."""


@dataclass(frozen=True)
class Wheel:
    """A wheel, as PEP 427 has it.

    Attributes:
        digest: SHA-256 of its content, hexadecimal.
    """

    file_name: str
    content: bytes
    digest: str


@cache
def this_wheel() -> Wheel:
    """The wheel.

    Raises:
        ShoalError: Shoal runs from its sources here, and is not installed.
    """
    try:
        installed = importlib.metadata.distribution(PROJECT)
    except importlib.metadata.PackageNotFoundError as error:
        raise ShoalError("Shoal is not installed here, only run from its sources: `pip install .`") from error
    info = f"{PROJECT}-{installed.version}.dist-info"
    files = {f"{info}/METADATA": (installed.read_text("METADATA") or "").encode()}
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if (entries := installed.read_text("entry_points.txt")) is not None:
        files[f"{info}/entry_points.txt"] = entries.encode()
    for package in PACKAGES:
        files |= _files_of(package)
    record = [f"{name},{_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    name = f"{PROJECT}-{installed.version}-py3-none-any.whl"
    return Wheel(name, content, hashlib.sha256(content).hexdigest())


def versions_here() -> list[str]:
    """What is installed here, as constraints of pip; without the local part of a version (2.13.0+cpu)."""
    return sorted(
        f"{each.name}=={each.version.partition('+')[0]}"
        for each in importlib.metadata.distributions()
        if each.name and each.name.lower() != PROJECT
    )


def _files_of(package: str) -> dict[str, bytes]:
    spec = importlib.util.find_spec(package)
    assert spec is not None, "this very file is part of one"
    assert spec.origin is not None, "it has an __init__.py"
    top = Path(spec.origin).parent
    return {
        str(path.relative_to(top.parent)): path.read_bytes()
        for path in sorted(top.rglob("*"))
        if path.is_file() and not _NOT_SHIPPED & set(path.parts)
    }


def _digest(content: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"sha256={encoded}"
