"""Tokenizer and token streams."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.storage import Storage
from tests.train_jobs.ranks import tiny_job, write_corpus
from train_jobs.data.documents import read_documents
from train_jobs.data.own_tokenizer import train_tokenizer
from train_jobs.data.token_streams import TokenStreams
from train_jobs.data.tokens import load_tokenizer, prepare_tokens


def prepared(config: TrainJobConfig, directory: Path) -> TokenStreams:
    prepare_tokens(config, directory)
    return TokenStreams(directory)


def test_streams_hold_every_document_once_closed_by_the_end_of_text(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    streams = prepared(config, tmp_path / "data")
    tokenizer = load_tokenizer(str(streams.tokenizer_directory), "test")
    assert len(tokenizer) == streams.vocab_size <= 300
    for stream, held_out in ((streams.train, False), (streams.held_out, True)):
        texts = [document.text for document in read_documents(config.data) if document.held_out is held_out]
        assert tokenizer.decode(stream.tokens.tolist()) == "".join(f"{text}<|endoftext|>" for text in texts)


def test_byte_level_tokens_bring_back_any_text(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    streams = prepared(config, tmp_path / "data")
    tokenizer = load_tokenizer(str(streams.tokenizer_directory), "test")
    text = "Zoë 🐟 魚 \t\r\n {}"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_work_that_was_cut_off_is_done_again_and_finished_work_is_not(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet"))
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "train.npy").write_bytes(b"half")
    first = prepared(config, directory)
    written = (directory / "train.npy").stat().st_mtime_ns
    again = prepared(config, directory)
    assert (directory / "train.npy").stat().st_mtime_ns == written
    assert np.array_equal(first.train.tokens, again.train.tokens)


def test_a_corpus_too_small_for_a_step_or_for_evaluation_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet", documents=3)
    with pytest.raises(RequestError, match="held_out_every"):
        prepare_tokens(tiny_job(corpus), tmp_path / "a")
    with pytest.raises(RequestError, match="training tokens"):
        prepare_tokens(tiny_job(corpus, data={"held_out_every": 2}, batch={"global": 512}), tmp_path / "b")
    with pytest.raises(RequestError, match="no tokenizer"):
        prepare_tokens(tiny_job(corpus, data={"tokenizer": str(tmp_path)}), tmp_path / "c")


def test_a_corpus_that_was_too_small_and_has_grown_is_read_again(tmp_path: Path) -> None:
    config = tiny_job(write_corpus(tmp_path / "corpus.parquet", documents=3), batch={"global": 8})
    for _ in range(2):
        with pytest.raises(RequestError, match="no document to evaluate on"):
            prepare_tokens(config, tmp_path / "data")
    write_corpus(tmp_path / "corpus.parquet", documents=60)
    streams = prepared(config, tmp_path / "data")
    assert len(streams.train.starts) + len(streams.held_out.starts) == 60


def other_corpus(path: Path) -> Path:
    """More of the same words, in another column."""
    table = pq.read_table(write_corpus(path, documents=40))
    pq.write_table(table.rename_columns(["body"]), path)
    return path


def test_what_streams_follow_from_is_looked_at_and_they_are_made_anew(tmp_path: Path) -> None:
    corpus, other = write_corpus(tmp_path / "corpus.parquet"), other_corpus(tmp_path / "other.parquet")
    directory, config = tmp_path / "data", tiny_job(corpus)
    first = prepared(config, directory)
    own = vocabulary(first)
    changes: list[dict[str, Any]] = [
        {"source": str(other), "text_column": "body"},
        {"held_out_every": 3},
        {"held_out_source": str(corpus)},
    ]
    for change in changes:
        changed = tiny_job(corpus, data=change)
        assert prepare_tokens(changed, directory), change
        anew = TokenStreams(directory)
        assert anew.content != first.content, change
        assert not prepare_tokens(changed, directory), "it is there now"
        # The model knows the tokens that it was trained on, and no others.
        assert vocabulary(anew) == own
    assert prepare_tokens(config, directory)
    assert TokenStreams(directory).content == first.content
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_another_tokenizer_is_taken_when_it_is_asked_for(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet")
    directory = tmp_path / "data"
    first = vocabulary(prepared(tiny_job(corpus), directory))
    small = prepared(tiny_job(corpus, model={"vocab_size": 260}), tmp_path / "small")
    changed = tiny_job(corpus, data={"tokenizer": str(small.tokenizer_directory)})
    assert prepare_tokens(changed, directory)
    assert vocabulary(TokenStreams(directory)) == vocabulary(small) != first


def vocabulary(streams: TokenStreams) -> dict[str, int]:
    return load_tokenizer(str(streams.tokenizer_directory), "").get_vocab()


@pytest.mark.parametrize("change", [{"source": "/nowhere.parquet"}, {"held_out_every": 1000}])
def test_data_that_cannot_be_had_leaves_what_was_there(tmp_path: Path, change: dict[str, Any]) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet")
    directory, config = tmp_path / "data", tiny_job(corpus)
    first = prepared(config, directory)
    with pytest.raises(RequestError):
        prepare_tokens(tiny_job(corpus, data=change), directory)
    assert not prepare_tokens(config, directory)
    assert TokenStreams(directory).content == first.content


class Killed(BaseException):
    """What ends a process wherever it is."""


def kill_at(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End before one of the changes of a storage, by its number."""
    calls = itertools.count()

    def deadly(real: Any) -> Any:
        def change(*arguments: Any, **named: Any) -> Any:
            if next(calls) == count:
                raise Killed
            return real(*arguments, **named)

        return change

    for name in ("write_bytes", "writer", "delete", "delete_dir", "copy_dir"):
        monkeypatch.setattr(Storage, name, deadly(getattr(Storage, name)))


def test_a_kill_between_the_old_streams_and_the_new_ones_loses_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each change of the directory, one after the other."""
    corpus, other = write_corpus(tmp_path / "corpus.parquet"), other_corpus(tmp_path / "other.parquet")
    directory = tmp_path / "data"
    streams = prepared(tiny_job(corpus), directory)
    first, content = vocabulary(streams), {False: streams.content}
    is_changed = False
    for count in itertools.count():
        is_changed = not is_changed
        change = {"source": str(other), "text_column": "body"} if is_changed else {}
        config = tiny_job(corpus, data=change)
        with monkeypatch.context() as patch:
            kill_at(count, patch)
            try:
                prepare_tokens(config, directory)
            except Killed:
                pass
            else:
                break
        if count % 3:  # what is asked for meanwhile is another thing
            prepare_tokens(tiny_job(corpus, data={"held_out_every": 3}), directory)
            assert vocabulary(TokenStreams(directory)) == first
        prepare_tokens(config, directory)
        streams = TokenStreams(directory)
        assert vocabulary(streams) == first
        assert streams.content == content.setdefault(is_changed, streams.content)
    assert count > 15, "the kills did not reach the end"


def test_text_that_looks_like_a_special_token_stays_text(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.parquet"
    texts = [f"page {index} about <|endoftext|> and how it ends" for index in range(24)]
    pq.write_table(pa.table({"text": texts}), corpus)
    streams = prepared(tiny_job(corpus), tmp_path / "data")
    tokenizer = load_tokenizer(str(streams.tokenizer_directory), "")
    ends = int((streams.train.tokens == tokenizer.eos_token_id).sum())
    assert ends == len(streams.train.starts) == 18, "one a document"
    assert tokenizer.decode(streams.train.tokens[: streams.train.starts[1] - 1].tolist()) == texts[0]


TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.name is defined %} by {{ m.name }}{% endif %}<|im_end|>\n{% endfor %}"
)


def chat_tokenizer(directory: Path) -> Path:
    tokenizer = train_tokenizer(["user assistant hello there fish"] * 20, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def chats(path: Path, role: str = "assistant") -> Path:
    said = [
        [
            {"role": "user", "content": f"hello {index}", "name": "me"},
            {"role": role, "content": "<|im_end|> fish"},
        ]
        for index in range(24)
    ]
    pq.write_table(pa.table({"messages": said}), path)
    return path


def test_conversations_are_put_into_the_words_of_the_template(tmp_path: Path) -> None:
    data = {"text_column": "messages", "tokenizer": str(chat_tokenizer(tmp_path / "tokenizer"))}
    streams = prepared(tiny_job(chats(tmp_path / "chats.parquet"), data=data), tmp_path / "data")
    tokenizer = load_tokenizer(data["tokenizer"], "")
    first = tokenizer.decode(streams.train.tokens[: streams.train.starts[1]].tolist())
    asked = "<|im_start|>user\nhello 0 by me<|im_end|>\n"
    assert first == f"{asked}<|im_start|>assistant\n<|im_end|> fish<|im_end|>\n<|endoftext|>"
    for turn in ("<|im_start|>", "<|im_end|>"):
        found = streams.train.tokens == tokenizer.convert_tokens_to_ids(turn)
        assert int(found.sum()) == 2 * 18, "what is said has none"


def test_a_conversation_that_has_no_template_or_does_not_fit_it_is_told(tmp_path: Path) -> None:
    column = {"text_column": "messages"}
    with pytest.raises(
        RequestError, match=r"row 0 holds a conversation, and the tokenizer has no chat template"
    ):
        prepare_tokens(tiny_job(chats(tmp_path / "a.parquet"), data=column), tmp_path / "data")
    data = {**column, "tokenizer": str(chat_tokenizer(tmp_path / "tokenizer"))}
    with pytest.raises(RequestError, match=r"row 0: the tokenizer's chat template refuses it: no tool"):
        prepare_tokens(tiny_job(chats(tmp_path / "b.parquet", "tool"), data=data), tmp_path / "data")
