"""Data that is prepared in a process of its own: what comes back of it, and how it is stopped."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from tests.processes import children_with
from tests.train_jobs.ranks import tiny_job, write_corpus
from train_jobs.data.token_streams import TokenStreams
from train_jobs.driver.data_errors import StoppedError
from train_jobs.driver.data_process import prepare_apart


def processes() -> list[psutil.Process]:
    """Those that prepare data for us."""
    return children_with("train_jobs.driver.data_process", recursive=True)


def kill_it() -> None:
    """Kill the one that prepares, and not what has forked it."""
    while not (forked := [each for each in processes() if each.ppid() != os.getpid()]):
        time.sleep(0.01)
    forked[0].kill()


def later(do: Callable[[], object]) -> threading.Thread:
    """Do something as soon as a process prepares data."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_what_is_prepared_is_there_and_is_not_prepared_again(tmp_path: Path) -> None:
    config, directory = tiny_job(write_corpus(tmp_path / "corpus.parquet")), tmp_path / "data"
    assert prepare_apart(config, directory, lambda: False)
    assert len(TokenStreams(directory).train.tokens)
    began = time.monotonic()
    assert not prepare_apart(config, directory, lambda: False)
    assert time.monotonic() - began < 1.0, "it takes no process to see that all is there"


def test_what_is_wrong_with_the_data_is_said_in_the_same_words(tmp_path: Path) -> None:
    config = tiny_job(tmp_path / "nowhere.parquet")
    with pytest.raises(RequestError, match=r"data\.source .*nowhere\.parquet.* cannot be read as Parquet"):
        prepare_apart(config, tmp_path / "data", lambda: False)


def test_a_job_that_is_stopped_waits_for_no_tokenizer(tmp_path: Path) -> None:
    config = tiny_job(Path("python-stdlib"), model={"vocab_size": 30_000})
    stop = threading.Event()
    began = time.monotonic()
    thread = later(lambda: (time.sleep(1.0), stop.set()))
    with pytest.raises(StoppedError):
        prepare_apart(config, tmp_path / "data", stop.is_set)
    thread.join()
    assert time.monotonic() - began < 10
    assert processes() == []
    assert not (tmp_path / "data").exists()


def test_a_job_that_is_stopped_waits_for_no_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, over = tiny_job(tmp_path / "nowhere.parquet"), threading.Event()
    monkeypatch.setattr(Storage, "read_bytes", lambda *_: over.wait(60))
    try:
        with pytest.raises(StoppedError, match="it is looked at what there is of the job's data"):
            prepare_apart(config, tmp_path / "data", lambda: True)
    finally:
        over.set()


def test_a_process_that_is_killed_is_no_data(tmp_path: Path) -> None:
    config = tiny_job(Path("python-stdlib"), model={"vocab_size": 30_000})
    thread = later(kill_it)
    with pytest.raises(ShoalError, match=r"ended without a word \(killed by SIGKILL\)"):
        prepare_apart(config, tmp_path / "data", lambda: False)
    thread.join()


def test_an_exception_of_the_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import train_jobs.data.preparation as data\ndata.PREPARATIONS['causal_lm'] = lambda *_: [][0]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    with pytest.raises(ShoalError, match="cannot be prepared: IndexError: list index out of range"):
        prepare_apart(config, tmp_path / "data", lambda: False)


def test_it_is_told_that_a_tokenizer_is_trained_for_as_long_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import train_jobs.data.preparation as data\n"
        "import train_jobs.driver.data_words as words\n"
        "data.FIRST_WORD_S = data.WORD_S = words.STILL_S = 0.2\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    config, said = tiny_job(Path("python-stdlib"), model={"vocab_size": 30_000}), list[str]()
    making = re.compile(
        r"training a tokenizer: making its tokens of the words of \d+ documents, for \d+ s now"
    )
    with pytest.raises(StoppedError):  # as soon as both were said
        prepare_apart(config, tmp_path / "data", lambda: any(map(making.fullmatch, said)), said.append)
    assert any(each.startswith("training a tokenizer: read ") for each in said)


def test_it_is_told_how_far_it_is_and_who_tells_and_dies_has_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "import train_jobs.data.preparation as data\n"
        "data.FIRST_WORD_S = data.WORD_S = 0.0\n"
        "if os.environ.get('DIES'):\n"
        "    data.PREPARATIONS['causal_lm'] = lambda _, to, tell, *rest: (tell('half'), os._exit(7))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    config, said = tiny_job(write_corpus(tmp_path / "corpus.parquet")), list[str]()
    assert prepare_apart(config, tmp_path / "data", lambda: False, said.append)
    streams = TokenStreams(tmp_path / "data")
    tokens = len(streams.train.tokens) + len(streams.held_out.tokens)
    assert said[0] == "reading the documents, and the tokenizer"
    assert said[-2:] == [
        f"tokenized 24 documents, {tokens:,} tokens so far",
        f"putting {tokens:,} tokens together",
    ]
    monkeypatch.setenv("DIES", "1")
    with pytest.raises(ShoalError, match=r"ended without a word \(exit code 7\)"):
        prepare_apart(config, tmp_path / "other", lambda: False, said.append)
    assert said[-1] == "half"
