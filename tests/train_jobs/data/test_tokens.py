"""Tokenizer and token streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster.errors import RequestError
from tests.train_jobs.ranks import tiny_job, write_corpus
from train_jobs.data.documents import read_documents
from train_jobs.data.tokens import TokenStreams, load_tokenizer


def test_streams_hold_every_document_once_closed_by_the_end_of_text(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    streams = TokenStreams.prepare(config, tmp_path / "data")
    tokenizer = load_tokenizer(str(streams.tokenizer_directory), "test")
    assert len(tokenizer) == streams.vocab_size <= 300
    for stream, held_out in ((streams.train, False), (streams.held_out, True)):
        texts = [document.text for document in read_documents(config.data) if document.held_out is held_out]
        assert tokenizer.decode(stream.tokens.tolist()) == "".join(f"{text}<|endoftext|>" for text in texts)


def test_byte_level_tokens_bring_back_any_text(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    streams = TokenStreams.prepare(config, tmp_path / "data")
    tokenizer = load_tokenizer(str(streams.tokenizer_directory), "test")
    text = "Zoë 🐟 魚 \t\r\n {}"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_work_that_was_cut_off_is_done_again_and_finished_work_is_not(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "train.npy").write_bytes(b"half")
    first = TokenStreams.prepare(config, directory)
    written = (directory / "train.npy").stat().st_mtime_ns
    again = TokenStreams.prepare(config, directory)
    assert (directory / "train.npy").stat().st_mtime_ns == written
    assert np.array_equal(first.train.tokens, again.train.tokens)


def test_a_corpus_too_small_for_a_step_or_for_evaluation_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet", documents=3)
    with pytest.raises(RequestError, match="held_out_every"):
        TokenStreams.prepare(tiny_job(corpus), tmp_path / "a")
    with pytest.raises(RequestError, match="training tokens"):
        TokenStreams.prepare(
            tiny_job(corpus, data={"held_out_every": 2}, batch={"global": 512}), tmp_path / "b"
        )
    with pytest.raises(RequestError, match="no tokenizer"):
        TokenStreams.prepare(tiny_job(corpus, data={"tokenizer": str(tmp_path)}), tmp_path / "c")
