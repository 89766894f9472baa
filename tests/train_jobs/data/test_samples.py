"""Packed samples: every token of a stream is a target once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_jobs.data.samples import DocumentSamples, PackedSamples


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
    assert bool((inputs + 1 == targets).all())
    assert inputs.dtype == torch.int64


def test_without_the_tail_all_samples_are_full() -> None:
    samples = PackedSamples(np.arange(21, dtype=np.uint16), 8)
    assert len(samples) == 2
    with pytest.raises(IndexError):
        samples.sample(2)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_of_documents_every_token_but_the_first_is_a_target_exactly_once(
    lengths: list[int], length: int, multiple: int, group: bool
) -> None:
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    samples = DocumentSamples(
        tokens, starts, length * multiple, micro=2, multiple=multiple, group_by_length=group
    )
    found = []
    for index in samples.arrangement().epoch(1, 0):
        batch = samples.batch([int(index)])
        assert batch["targets"].shape[1] % multiple == 0
        counted = batch["targets"][0] != -100
        assert bool((batch["input_ids"][0][counted] + 1 == batch["targets"][0][counted]).all())
        found += batch["targets"][0][counted].tolist()
    firsts = {int(start) for start, size in zip(starts, lengths, strict=True) if size}
    assert sorted(found) == [token for token in range(sum(lengths)) if token not in firsts]


def test_documents_are_padded_to_the_longest_of_a_batch() -> None:
    samples = DocumentSamples(np.arange(12, dtype=np.uint16), np.asarray([0, 3, 10]), 100, micro=2)
    assert samples.batch([0, 2])["input_ids"].tolist() == [[0, 1], [10, 0]]
    assert samples.batch([0, 2])["targets"].tolist() == [[1, 2], [11, -100]]
    assert samples.batch([0, 1])["input_ids"].shape == (2, 6)
