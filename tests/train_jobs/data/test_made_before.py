"""Tokens that another job has made of the same are copied; of anything else they are made."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.storage import Storage
from tests.train_jobs.ranks import merged, tiny_job, write_corpus
from train_jobs.data import made_before
from train_jobs.data.made_before import SETTLED_S, key_of
from train_jobs.data.token_streams import STAGED, TOKENIZER, TokenStreams
from train_jobs.data.tokens import prepare_tokens

COPIED = "another job has made the same tokens: they are copied"


class Jobs:
    """Jobs of one storage."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.corpus = write_corpus(directory / "corpus.parquet")
        self.settle()
        self.notes = Storage(directory / "prepared")
        self.config = tiny_job(self.corpus)

    def settle(self, seconds_ago: float = 60.0) -> None:
        """Let the corpus be as old as this."""
        then = time.time() - seconds_ago
        os.utime(self.corpus, (then, then))

    def prepare(self, name: str, config: TrainJobConfig | None = None) -> bool:
        """Prepare the data of a job; whether it was copied."""
        said: list[str] = []
        assert prepare_tokens(config or self.config, self.place(name), said.append, notes=self.notes)
        return COPIED in said

    def place(self, name: str) -> Path:
        return self.directory / name / "data"

    def changed(self, **sections: Any) -> TrainJobConfig:
        document = merged(json.loads(self.config.model_dump_json()), sections)
        return TrainJobConfig.model_validate_json(json.dumps(document))


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_what_was_made_of_the_same_is_copied(jobs: Jobs) -> None:
    assert not jobs.prepare("first")
    assert jobs.prepare("second")
    assert files(jobs.place("first")) == files(jobs.place("second"))
    streams = TokenStreams(jobs.place("second"))
    assert np.array_equal(streams.train.tokens, TokenStreams(jobs.place("first")).train.tokens)
    assert not prepare_tokens(jobs.config, jobs.place("second"), notes=jobs.notes), "it is there"


def test_a_copy_stays_when_the_first_is_gone_and_others_are_made_again(jobs: Jobs) -> None:
    jobs.prepare("first")
    jobs.prepare("second")
    for path in sorted(jobs.place("first").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert len(TokenStreams(jobs.place("second")).train.tokens)
    assert not jobs.prepare("third")
    assert jobs.prepare("fourth"), "the third has noted it"


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"held_out_every": 7}},
        {"model": {"vocab_size": 290}},
    ],
)
def test_what_follows_from_another_config_is_made(jobs: Jobs, change: dict[str, Any]) -> None:
    jobs.prepare("first")
    assert not jobs.prepare("second", jobs.changed(**change))
    assert jobs.prepare("third")


def test_what_does_not_change_the_tokens_does_not_matter(jobs: Jobs) -> None:
    jobs.prepare("first")
    assert jobs.prepare("second", jobs.changed(data={"sequence_length": 8}, steps=3))


def _rewritten(jobs: Jobs) -> None:
    write_corpus(jobs.corpus)
    jobs.settle(30.0)


def _a_moment_ago(jobs: Jobs) -> None:
    jobs.settle(SETTLED_S / 2)


def _another_library(jobs: Jobs) -> None:
    made_before.version = lambda name: "0"  # type: ignore[assignment]


@pytest.mark.parametrize("happens", [_rewritten, _a_moment_ago, _another_library])
def test_what_may_be_something_else_by_now_is_made(
    jobs: Jobs, happens: Callable[[Jobs], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_before, "version", made_before.version)
    jobs.prepare("first")
    happens(jobs)
    assert not jobs.prepare("second")


def test_files_that_changed_a_moment_ago_are_not_noted(jobs: Jobs) -> None:
    jobs.settle(0.0)
    assert key_of(jobs.config, {}) is None
    assert not jobs.prepare("first")
    jobs.settle()
    assert not jobs.prepare("second")


def test_what_became_something_else_while_it_was_copied_is_made(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.prepare("first")
    copy = Storage.copy_dir

    def slowly(self: Storage, source: Storage, *arguments: Any, **named: Any) -> None:
        copy(self, source, *arguments, **named)
        if source.location.endswith("first/data"):
            prepare_tokens(jobs.changed(data={"held_out_every": 5}), jobs.place("first"))

    monkeypatch.setattr(Storage, "copy_dir", slowly)
    assert not jobs.prepare("second")
    monkeypatch.undo()
    assert jobs.prepare("third")
    assert files(jobs.place("third")) == files(jobs.place("second"))


def test_who_names_the_tokenizer_that_another_has_trained_has_its_tokens(jobs: Jobs) -> None:
    jobs.prepare("first")
    published = jobs.directory / "published"
    trained = AutoTokenizer.from_pretrained(jobs.place("first") / TOKENIZER, local_files_only=True)
    trained.save_pretrained(published)
    (published / "config.json").write_text("{}")
    named = jobs.changed(data={"tokenizer": str(published)})
    assert jobs.prepare("second", named)
    assert not (jobs.place("second") / STAGED).exists()
    assert not prepare_tokens(named, jobs.place("second"), notes=jobs.notes), "it is there, and as named"
    first, second = (TokenStreams(jobs.place(name)) for name in ("first", "second"))
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert np.array_equal(first.held_out.tokens, second.held_out.tokens)
    moved = shutil.copytree(published, jobs.directory / "moved")
    assert jobs.prepare("third", jobs.changed(data={"tokenizer": str(moved)}))


def _with_other_merges(published: Path) -> None:
    document = json.loads((published / "tokenizer.json").read_text())
    document["model"]["merges"] = document["model"]["merges"][:-1]
    (published / "tokenizer.json").write_text(json.dumps(document))


def _with_another_end(published: Path) -> None:
    document = json.loads((published / "tokenizer_config.json").read_text())
    document["eos_token"] = "a"
    (published / "tokenizer_config.json").write_text(json.dumps(document))


def _with_a_template(published: Path) -> None:
    (published / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


@pytest.mark.parametrize("change", [_with_other_merges, _with_another_end, _with_a_template])
def test_a_tokenizer_that_differs_makes_its_own_tokens(jobs: Jobs, change: Callable[[Path], None]) -> None:
    jobs.prepare("first")
    published = Path(shutil.copytree(jobs.place("first") / TOKENIZER, jobs.directory / "published"))
    change(published)
    assert not jobs.prepare("second", jobs.changed(data={"tokenizer": str(published)}))


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"place": "/no/where"}'])
def test_a_note_that_leads_nowhere_hurts_nobody(jobs: Jobs, note: bytes) -> None:
    jobs.prepare("first")
    for name in jobs.notes.list():
        jobs.notes.write_bytes(name, note)
    assert not jobs.prepare("second")
    assert jobs.prepare("third")


def test_a_copy_that_is_too_small_is_refused_as_what_was_made_is(jobs: Jobs) -> None:
    jobs.prepare("first")
    huge = jobs.changed(data={"sequence_length": 100_000})
    for name in ("second", "third"):
        with pytest.raises(RequestError, match="training tokens; one step takes"):
            jobs.prepare(name, huge)
