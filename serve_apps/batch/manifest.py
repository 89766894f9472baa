"""What an output belongs to: the document beside its files, without which no run goes on with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from cluster.config.models.model_sizes import is_directory
from cluster.errors import RequestError
from cluster.files.storage import Storage

MANIFEST = "_manifest.json"
"""Its name: readers of Parquet directories pass over names that begin with an underscore."""
FORMAT = 1
_WORDS = {
    "app": "app",
    "model": "model",
    "model_version": "model version",
    "engine": "engine",
    "precision": "precision",
    "context_length": "context length",
    "max_tokens": "limits.max_tokens",
    "sampling": "sampling",
    "input": "input",
    "input_digest": "list of input files, their sizes and rows",
    "rows_per_shard": "rows of a shard",
}
"""The fields that must agree for a run to go on with what is there, in words."""


@dataclass(frozen=True)
class Totals:
    """Sums over rows."""

    rows: int = 0
    failed: int = 0
    """Rows that have an error in place of an answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Manifest:
    """One output directory's document; JSON in the file `_manifest.json`."""

    app: str
    model: str
    """What the config names."""
    model_version: str
    """What that meant when the first run began; all rows are answered by it."""
    engine: str
    precision: str
    context_length: int | None
    max_tokens: int | None
    """The app's limit, which is the default of a row that names no `max_tokens`."""
    sampling: Mapping[str, Any]
    """The fields of a request that the command was given."""
    input: str
    input_digest: str
    rows: int
    rows_per_shard: int
    shards: int
    created_at: str
    """ISO 8601, in UTC."""
    state: Literal["running", "done"] = "running"
    totals: Totals | None = None
    """Of all rows, once it is done."""
    format: int = FORMAT

    def write(self, output: Storage) -> None:
        """Put it into an output directory; atomic."""
        output.write_bytes(MANIFEST, json.dumps(asdict(self), indent=2).encode() + b"\n")

    def require_same(self, other: Manifest, place: str) -> None:
        """Check that `other`, which is at `place` already, is of the same work.

        Raises:
            RequestError: it is not, with what differs.
        """
        differing = [name for name in _WORDS if getattr(self, name) != getattr(other, name)]
        # Other names of the same version are no difference; directories of the same name are.
        named = not is_directory(self.model) and not is_directory(other.model)
        if named and "model" in differing and "model_version" not in differing:
            differing.remove("model")
        if differing:
            facts = "; ".join(_difference(name, self, other) for name in differing)
            raise RequestError(
                f"{place} holds the output of another run ({facts}); nothing was changed:"
                " name another --output, or run it as before"
            )


def read_manifest(output: Storage) -> Manifest | None:
    """The document of an output directory; None where there is nothing yet.

    Raises:
        RequestError: there are other files, or the document is of another format.
    """
    if not output.exists(MANIFEST):
        other = next(iter(output.list()), None)
        if other is not None:
            raise RequestError(
                f"{output.location} is not empty (it holds {other}) and no output of `shoal batch`;"
                " name another --output"
            )
        return None
    try:
        document = json.loads(output.read_bytes(MANIFEST))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        totals = document["totals"]
        return Manifest(**{**document, "totals": None if totals is None else Totals(**totals)})
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{output.location}/{MANIFEST} is no manifest that this version reads ({error});"
            " name another --output"
        ) from error


def _difference(name: str, new: Manifest, old: Manifest) -> str:
    if name == "input_digest":
        return f"another {_WORDS[name]}: {old.rows} rows then, {new.rows} now"
    return f"{_WORDS[name]} {getattr(old, name)!r} there, {getattr(new, name)!r} now"
