"""Packed samples: every token of a stream is a target once."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train_jobs.data.order import SampleOrder
from train_jobs.data.samples import DocumentSamples, PackedSamples, Pieces


@settings(deadline=None)
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


@settings(deadline=None)
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


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 26), max_size=20),
    st.integers(1, 150),
    st.integers(1, 7),
    st.integers(0, 2**32),
)
def test_documents_are_cut_as_one_would_cut_them_by_hand(
    lengths: list[int], repeated: int, length: int, seed: int
) -> None:
    lengths = lengths * repeated  # several blocks
    ends = np.cumsum(lengths)
    starts = ends - lengths if lengths else np.zeros(0, dtype=np.int64)
    expected = [
        (start, min(start + length + 1, int(ends[document])))
        for document, first in enumerate(starts.tolist())
        for start in range(first, int(ends[document]) - 1, length)
    ]
    pieces = Pieces(starts, sum(lengths), length)
    assert len(pieces) == len(expected)
    asked = np.random.default_rng(seed).permutation(len(expected))[:200]
    assert [pieces[int(index)] for index in asked] == [expected[index] for index in asked]
    assert pieces.sizes(asked).tolist() == [expected[index][1] - expected[index][0] for index in asked]
    with pytest.raises(IndexError):
        pieces[len(expected)]


class Counted:
    """An array that is computed where it is looked at: as long as a large file's, without the file."""

    def __init__(self, length: int, step: int) -> None:
        self.length = length
        self.step = step

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.arange(*part.indices(self.length)) * self.step


@pytest.mark.parametrize("group", [False, True])
def test_samples_of_many_documents_take_no_memory(group: bool) -> None:
    documents, length = 30_000_000, 50
    tracemalloc.start()
    samples = DocumentSamples(
        Counted(documents * length, 1),  # type: ignore[arg-type]
        Counted(documents, length),  # type: ignore[arg-type]
        30,
        micro=4,
        group_by_length=group,
    )
    assert len(samples) == 2 * documents
    order = SampleOrder(samples.arrangement(), seed=3)
    batch = samples.batch([order.at(position) for position in range(40_000_000, 40_000_004)])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (batch["targets"] != -100).sum(dim=1).unique().tolist() in ([30], [19], [19, 30])
    assert most < 20e6, "it was 32 bytes a sample"
