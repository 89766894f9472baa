"""Two corpora as token streams, compared."""

from __future__ import annotations

import numpy as np

from train_jobs.data.token_streams import TokenStreams


def assert_same(found: TokenStreams, expected: TokenStreams) -> None:
    for part in ("train", "held_out"):
        for own, other in zip(getattr(found, part), getattr(expected, part), strict=True):
            assert own.dtype == other.dtype
            assert np.array_equal(own, other)
    assert found.content == expected.content
