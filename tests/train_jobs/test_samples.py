"""Packed samples: every token of a stream is a target once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_jobs.data.samples import PackedSamples


@given(st.integers(0, 300), st.integers(1, 40))
def test_with_the_tail_kept_every_token_but_the_first_is_a_target_exactly_once(
    tokens: int, length: int
) -> None:
    stream = np.arange(tokens, dtype=np.uint16)
    samples = PackedSamples(stream, length, keep_tail=True)
    targets = [
        int(target)
        for index in range(len(samples))
        for target in samples.batch([index])["targets"][0]
        if target != -100
    ]
    assert targets == list(range(1, tokens))
    assert samples.num_targets == len(targets)


def test_inputs_are_the_tokens_before_their_targets() -> None:
    samples = PackedSamples(np.arange(100, dtype=np.uint32), 8)
    inputs, targets = samples.batch([0, 3]).values()
    assert inputs.shape == targets.shape == (2, 8)
    assert (inputs + 1 == targets).all()
    assert inputs.dtype == np.int64


def test_without_the_tail_all_samples_are_full() -> None:
    samples = PackedSamples(np.arange(21, dtype=np.uint16), 8)
    assert len(samples) == 2
    with pytest.raises(IndexError):
        samples.sample(2)
