"""A model that an app may come to serve, as its checks see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.config.models.model_sizes import ModelSizes
from cluster.config.reading.positions import KeyPath
from cluster.config.sections.model import ModelConfig


@dataclass(frozen=True)
class ServedModel:
    """What is known of it."""

    words: str
    """Where it is from, as messages name it."""
    sizes: ModelSizes
    source: Path | ModelConfig
    """Its directory, or the sizes that a job makes it from."""
    uses: tuple[KeyPath, ...] = ()
    """The parts of the config, beside the app's own, that its sizes follow from."""
