"""What a batch is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BatchRequest:
    """An input whose rows an app of the config is to answer, and where the answers go."""

    input: str
    output: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of an HTTP request that hold for every row whose columns say nothing else."""
    replicas: int | None = None
    """Default: the app's replicas.min, at least 1."""
    rows_per_shard: int | None = None
    """Default: chosen at the first run."""
