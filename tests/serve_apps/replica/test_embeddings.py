"""Embeddings that are shortened and scaled, of models that are made for it and of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_apps.openai.errors import ApiError
from serve_apps.replica.embeddings import EmbeddingSizes, as_asked


@pytest.mark.parametrize(
    ("config", "takes", "refuses"),
    [
        ({}, [], [1, 64]),
        ({"is_matryoshka": False}, [], [64]),
        ({"is_matryoshka": True}, [1, 64], []),
        ({"matryoshka_dimensions": [64, 128]}, [64, 128], [1, 65]),
        ({"is_matryoshka": True, "matryoshka_dimensions": [64]}, [64], [32]),
    ],
    ids=str,
)
def test_a_models_config_says_whether_its_embeddings_may_be_cut(
    config: dict[str, Any], takes: list[int], refuses: list[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = EmbeddingSizes.of(str(tmp_path))
    for dimensions in (None, *takes):
        sizes.check(dimensions)
    for dimensions in refuses:
        with pytest.raises(ApiError, match="config says") as refused:
            sizes.check(dimensions)
        assert (refused.value.status, refused.value.param) == (400, "dimensions")


def test_what_is_cut_has_length_1() -> None:
    assert as_asked([3.0, 4.0, 12.0], {}) == [3.0, 4.0, 12.0]
    assert as_asked([3.0, 4.0, 12.0], {"dimensions": 2}) == pytest.approx([0.6, 0.8])
    assert as_asked([3.0, 4.0], {"scaled": True}) == pytest.approx([0.6, 0.8])
    assert as_asked([0.0, 0.0, 1.0], {"dimensions": 2}) == [0.0, 0.0]
    with pytest.raises(ApiError, match="embeddings have 3"):
        as_asked([3.0, 4.0, 12.0], {"dimensions": 4})
