"""Data that a job cannot be trained on is a mistake at its place, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cluster.config.config_files import load, mistakes, position

IMAGE = {"bytes": b"x", "path": "x.png"}


def write_sources(directory: Path) -> None:
    """Parquet of many kinds, and some that is none."""
    (directory / "empty").mkdir()
    (directory / "none").mkdir()
    (directory / "none" / "a.parquet").write_text("hello")
    (directory / "mixed").mkdir()
    pq.write_table(pa.table({"text": ["one"]}), directory / "mixed" / "a.parquet")
    pq.write_table(pa.table({"text": [1]}), directory / "mixed" / "b.parquet")
    for name, columns in (
        ("text", {"text": ["one", "two"]}),
        ("body", {"body": ["one", "two"]}),
        ("number", {"text": [1, 2]}),
        ("images", {"image": [IMAGE], "label": [0]}),
        ("bytes", {"image": [b"x"], "label": [0]}),
        ("named", {"image": [IMAGE], "label": ["cat"]}),
    ):
        pq.write_table(pa.table(columns), directory / f"{name}.parquet")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere.parquet", "nowhere.parquet` does not exist"),
        ("empty", "empty' holds no Parquet file"),
        ("none", "none' cannot be read as Parquet: "),
        ("body.parquet", "body.parquet' has no column 'text'; it has body"),
        ("number.parquet", "(data.text_column) holds int64, not text"),
        ("mixed", "mixed/b.parquet: column 'text' holds int64; in "),
        ("s3://", "`s3://` names no bucket, host or path"),
        ("ftp://host/x.parquet", "`ftp://host/x.parquet` has an unknown scheme; pyarrow reads file, s3"),
        ("file:///nowhere/x.parquet", "'file:///nowhere/x.parquet' cannot be read as Parquet: "),
    ],
)
@pytest.mark.parametrize("key", ["source", "held_out_source"])
def test_text_that_cannot_be_read(key: str, source: str, words: str, tmp_path: Path) -> None:
    write_sources(tmp_path)
    text = f"train_jobs:\n  j: {{data: {{{key}: '{source}'}}}}\n"
    (found,) = mistakes(tmp_path, text)
    assert found.path == f"train_jobs.j.data.{key}"
    assert (found.line, found.column) == position(text, f"'{source}'")
    assert words in found.message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("text.parquet", "has no column 'image'; it has text"),
        ("bytes.parquet", "(data.image_column) holds binary, not images in the Hugging Face layout"),
        ("named.parquet", "(data.label_column) holds string, not whole numbers"),
    ],
)
def test_images_that_cannot_be_read(source: str, words: str, tmp_path: Path) -> None:
    write_sources(tmp_path)
    (found,) = mistakes(
        tmp_path, f"train_jobs:\n  j: {{task: image_classification, data: {{source: {source}}}}}\n"
    )
    assert found.path == "train_jobs.j.data.source"
    assert words in found.message


def test_data_that_can_be_read_is_no_mistake(tmp_path: Path) -> None:
    write_sources(tmp_path)
    (tmp_path / "mine.py").write_text(
        "class Task:\n" + "".join(f"    def {name}(self): pass\n" for name in ("build", "samples", "loss"))
    )
    (tmp_path / "config.json").write_text("{}")
    for job in (
        "{data: {source: text.parquet, held_out_source: text.parquet}}",
        "{data: {source: body.parquet, text_column: body}}",
        "{data: {source: s3://bucket/data}}",
        "{task: image_classification, data: {source: images.parquet}}",
        "{task: 'mine:Task', data: {source: number.parquet, tokenizer: text.parquet}}",
        "{task: 'mine:Task', data: {source: 'https://host/x'}, model: {directory: .}}",
    ):
        load(tmp_path, f"train_jobs:\n  j: {job}\n")


def model_directory(directory: Path, *files: str, config: str = '{"model_type": "llama"}') -> None:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    for name in files:
        (directory / name).touch()


def test_a_model_directory_has_to_be_whole(tmp_path: Path) -> None:
    model_directory(tmp_path / "typeless", "model.safetensors", "tokenizer.json", config="{}")
    model_directory(tmp_path / "weightless", "tokenizer.json")
    model_directory(tmp_path / "wordless", "model.safetensors")
    (tmp_path / "bare").mkdir()
    model_directory(tmp_path / "whole", "model.safetensors", "tokenizer.json")
    for model, path, words in (
        ("{directory: typeless}", "model.directory", "typeless` holds a config.json without model_type"),
        ("{directory: weightless}", "model.directory", "weightless` holds no weights (*.safetensors, *.bin)"),
        ("{directory: wordless}", "model.directory", "wordless` holds no tokenizer (tokenizer*, vocab*, "),
        ("{directory: whole}, data: {tokenizer: gone}", "data.tokenizer", "gone` does not exist"),
        (
            "{directory: wordless}, data: {tokenizer: bare}",
            "data.tokenizer",
            "bare` holds no tokenizer (",
        ),
    ):
        (found,) = mistakes(tmp_path, f"train_jobs:\n  j: {{model: {model}}}\n")
        assert found.path == f"train_jobs.j.{path}"
        assert words in found.message
    load(tmp_path, "train_jobs:\n  j: {model: {directory: whole}}\n")
    load(tmp_path, "train_jobs:\n  j: {model: {directory: wordless}, data: {tokenizer: whole}}\n")
