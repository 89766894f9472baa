"""Which checkpoints count, and which are kept."""

from __future__ import annotations

from pathlib import Path

from train_jobs.checkpoint.store import COMMIT_MARKER, CheckpointStore


def write(store: CheckpointStore, step: int, *, keep: int = 10) -> None:
    store.prepare(step)
    (store.path(step) / "__0_0.distcp").write_bytes(b"x" * 100)
    (store.path(step) / ".metadata").write_bytes(b"y" * 10)
    store.commit(step, {"world_size": 1}, keep)


def test_a_checkpoint_counts_only_once_it_is_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest() is None
    write(store, 50)
    store.prepare(100)
    (store.path(100) / "__0_0.distcp").write_bytes(b"x" * 100)
    assert store.newest() == 50
    assert store.drop_incomplete() == [100]
    assert not store.path(100).exists()
    assert store.newest() == 50


def test_a_truncated_or_missing_file_makes_a_checkpoint_incomplete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        write(store, step)
    (store.path(30) / "__0_0.distcp").write_bytes(b"x" * 99)
    assert store.newest() == 20
    (store.path(20) / ".metadata").unlink()
    assert store.newest() == 10
    assert store.steps() == [10]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30, 40):
        write(store, step, keep=2)
    assert store.steps() == [30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


def test_a_step_that_is_saved_again_replaces_what_was_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 10)
    store.prepare(10)
    assert store.newest() is None
    assert not (store.path(10) / COMMIT_MARKER).exists()
    write(store, 10)
    assert store.newest() == 10


def test_other_files_in_the_directory_do_not_disturb(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    write(store, 5)
    assert store.steps() == [5]
    assert store.drop_incomplete() == []
