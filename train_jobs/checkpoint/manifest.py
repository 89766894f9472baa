"""What makes a checkpoint count: the manifest, written last, which vouches for every file and for itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.files.backend import MissingError
from cluster.files.storage import Storage

COMMIT_MARKER = "committed.json"
"""A checkpoint without it, or with one that is not whole, is never loaded."""


@dataclass(frozen=True)
class FileFact:
    """A file as it was written."""

    size_bytes: int
    digest: str
    """SHA-256, in hexadecimal digits."""


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, by name, and what is known of it: step, world size, evaluation."""

    files: Mapping[str, FileFact]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def digest(self) -> str:
        """Of what is in the files; what is noted of the checkpoint later changes nothing."""
        named = {name: file.digest for name, file in self.files.items()}
        return hashlib.sha256(_canonical(named).encode()).hexdigest()


def write_manifest(storage: Storage, directory: str, manifest: Manifest) -> None:
    """Commit a checkpoint: it counts from here on."""
    content = _canonical(
        {"files": {n: asdict(f) for n, f in manifest.files.items()}, "facts": manifest.facts}
    )
    whole = {"digest": hashlib.sha256(content.encode()).hexdigest(), "manifest": json.loads(content)}
    storage.write_bytes(f"{directory}/{COMMIT_MARKER}", json.dumps(whole, indent=1).encode())


class BrokenManifestError(Exception):
    """A manifest is not what was written."""


def read_manifest(storage: Storage, directory: str) -> Manifest | None:
    """The manifest of a checkpoint; None where there is none.

    Raises:
        BrokenManifestError: there is one, but it is not what was written.
    """
    try:
        whole = json.loads(storage.read_bytes(f"{directory}/{COMMIT_MARKER}"))
        content = whole["manifest"]
        digest = hashlib.sha256(_canonical(content).encode()).hexdigest()
        if digest != whole["digest"]:
            raise BrokenManifestError
        files = {name: FileFact(**fact) for name, fact in content["files"].items()}
        return Manifest(files, content["facts"])
    except MissingError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenManifestError from error


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
