"""Embeddings as requests want them: shortened, where the model is made for it, and scaled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any

from serve_apps.openai.errors import bad_request


@dataclass(frozen=True)
class EmbeddingSizes:
    """To which lengths a model's embeddings may be cut (Kusupati et al., Matryoshka Representation Learning).

    A model's config says it as vLLM reads it: `is_matryoshka`, or `matryoshka_dimensions`, a list of lengths.
    """

    any: bool = False
    these: tuple[int, ...] = ()

    @classmethod
    def of(cls, directory: str) -> EmbeddingSizes:
        """Those of the model in a directory."""
        path = Path(directory, "config.json")
        config: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        these = tuple(config.get("matryoshka_dimensions") or ())
        return cls(bool(config.get("is_matryoshka")), these)

    def check(self, dimensions: int | None) -> None:
        """Raise ApiError where embeddings of this model cannot be cut so."""
        if dimensions is None or dimensions in self.these or (self.any and not self.these):
            return
        takes = (
            f"its embeddings may have {', '.join(map(str, self.these))} dimensions, not {dimensions}"
            if self.these
            else "its embeddings are not made to be shortened; leave 'dimensions' out"
        )
        raise bad_request(f"The model's config says: {takes}.", param="dimensions", code="invalid_value")


def as_asked(embedding: Sequence[float], request: Mapping[str, Any]) -> list[float]:
    """An embedding as its request wants it: `dimensions` cuts and scales it, `scaled` scales it to length 1.

    Raises:
        ApiError: it has fewer numbers than are asked for.
    """
    dimensions = request.get("dimensions")
    if dimensions is not None and dimensions > len(embedding):
        raise bad_request(
            f"'dimensions' is {dimensions}; this model's embeddings have {len(embedding)}.",
            param="dimensions",
            code="invalid_value",
        )
    cut = list(embedding[:dimensions])
    length = hypot(*cut) if dimensions is not None or request.get("scaled") else 0.0
    return [number / length for number in cut] if length else cut
