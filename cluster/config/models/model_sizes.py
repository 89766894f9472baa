"""The sizes of a model that the checks need: of one made by a job, or of a Hugging Face directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.sections.model import ModelConfig


class ModelDirectoryError(Exception):
    """A directory holds no model that can be looked into; the message is the end of "`PATH` …"."""


@dataclass(frozen=True)
class ModelSizes:
    """What is known of a model; None where its config.json does not say."""

    heads: int | None
    kv_heads: int | None
    context_length: int | None
    """Longest sequence in tokens."""
    layers: int | None = None
    head_size: int | None = None
    """Numbers in the key, and in the value, of one head."""

    def cache_numbers(self) -> int | None:
        """Numbers that the keys and values of one token take in all layers."""
        if self.layers is None or self.kv_heads is None or self.head_size is None:
            return None
        return 2 * self.layers * self.kv_heads * self.head_size


def is_directory(model: str) -> bool:
    """Whether an app's `model` names a directory rather than a model of the registry."""
    return model in (".", "..", "~") or model.startswith(("./", "../", "/", "~/"))


def sizes_of_job(model: ModelConfig) -> ModelSizes:
    """The sizes of the model that a job trains (its directory is absolute).

    Raises:
        ModelDirectoryError: the directory it starts from cannot be looked into.
    """
    if model.directory is not None:
        return read_sizes(Path(model.directory))
    return ModelSizes(
        model.num_heads,
        model.kv_heads,
        model.max_position_embeddings,
        model.num_layers,
        model.hidden_size // model.num_heads,
    )


def read_sizes(directory: Path) -> ModelSizes:
    """The sizes that a Hugging Face directory's config.json gives.

    Raises:
        ModelDirectoryError: there is no directory, or no config.json that can be read.
    """
    content = read_model_config(directory)
    heads = _count(content, "num_attention_heads")
    hidden_size = _count(content, "hidden_size")
    head_size = _count(content, "head_dim") or (hidden_size // heads if hidden_size and heads else None)
    return ModelSizes(
        heads,
        _count(content, "num_key_value_heads") or heads,
        _count(content, "max_position_embeddings"),
        _count(content, "num_hidden_layers"),
        head_size,
    )


def read_model_config(directory: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face directory.

    Raises:
        ModelDirectoryError: there is no directory, or no config.json that can be read.
    """
    file = directory / "config.json"
    try:
        if not directory.exists():
            raise ModelDirectoryError("does not exist")
        if not directory.is_dir():
            raise ModelDirectoryError("is not a directory")
        if not file.is_file():
            raise ModelDirectoryError("holds no config.json, so it is no Hugging Face model directory")
        content: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(
            f"holds a config.json that cannot be read ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict):
        raise ModelDirectoryError("holds a config.json that is no JSON object")
    return content


def newest_version(models: Path, name: str) -> Path | None:
    """The newest complete-looking version of a model under `<storage>/models`; None where there is none."""
    try:
        versions = [int(entry.name) for entry in (models / name).iterdir() if entry.name.isdecimal()]
    except OSError:
        return None
    return models / name / str(max(versions)) if versions else None


def _count(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
