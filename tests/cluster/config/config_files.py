"""Config files for tests: what is wrong in a text, as (line, column, path, message)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.config.loader import LoadedConfig, load_config
from cluster.errors import ConfigError, Mistake


def write(directory: Path, content: str | bytes) -> Path:
    path = directory / "shoal.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def load(
    directory: Path, content: str | bytes, overrides: Sequence[str] = (), scope: str | None = None
) -> LoadedConfig:
    return load_config(write(directory, content), overrides, scope)


def mistakes(
    directory: Path, content: str | bytes, overrides: Sequence[str] = (), scope: str | None = None
) -> tuple[Mistake, ...]:
    """What is wrong with the file; the test fails when nothing is."""
    with pytest.raises(ConfigError) as raised:
        load(directory, content, overrides, scope)
    assert raised.value.exit_code == 2
    return raised.value.mistakes


def places(found: Sequence[Mistake]) -> list[tuple[int | None, int | None, str]]:
    return [(mistake.line, mistake.column, mistake.path) for mistake in found]


def position(content: str, marker: str) -> tuple[int, int]:
    """Line and column (from 1) of the only place where `marker` stands in the text."""
    assert content.count(marker) == 1, marker
    before = content[: content.index(marker)]
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
