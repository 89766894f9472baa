"""Which checkpoints count, which are kept, and which are found damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.files.storage import Storage
from train_jobs.checkpoint.files import StorageFileSystem, damage
from train_jobs.checkpoint.manifest import COMMIT_MARKER, Manifest, write_manifest
from train_jobs.checkpoint.retention import Retention
from train_jobs.checkpoint.store import CheckpointStore, checkpoint_name

LAST_TEN = Retention(newest=10)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(Storage(tmp_path))


def write(store: CheckpointStore, step: int, *, commit: bool = True, loss: float | None = None) -> None:
    store.prepare(step)
    files = StorageFileSystem(store.storage)
    for name, content in (("__0_0.distcp", b"x" * 100), (".metadata", b"y" * 10)):
        with files.create_stream(f"{checkpoint_name(step)}/{name}", "wb") as stream:
            stream.write(content)
    if commit:
        named = {path.split("/")[1]: fact for path, fact in files.written.items()}
        evaluation = None if loss is None else {"loss": loss}
        write_manifest(store.storage, checkpoint_name(step), Manifest(named, {"evaluation": evaluation}))


def path(store: CheckpointStore, step: int, name: str) -> Path:
    found = store.storage.local_path(f"{checkpoint_name(step)}/{name}")
    assert found is not None
    return found


def test_a_checkpoint_counts_only_once_it_is_committed(store: CheckpointStore) -> None:
    assert store.newest() is None
    write(store, 50)
    write(store, 100, commit=False)
    assert store.newest() == 50
    assert store.drop_unfinished() == [100]
    assert not path(store, 100, "").exists()
    assert store.newest() == 50


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("__0_0.distcp", b"x" * 99, "__0_0.distcp has 99 bytes; 100 were written"),
        (".metadata", None, ".metadata is missing"),
        (COMMIT_MARKER, b"{", "committed.json is not what was written"),
        (COMMIT_MARKER, b'{"digest": "", "manifest": {}}', "committed.json is not what was written"),
    ],
)
def test_damage_that_shows_at_a_glance(
    name: str, content: bytes | None, reason: str, store: CheckpointStore
) -> None:
    write(store, 10)
    write(store, 20)
    if content is None:
        path(store, 20, name).unlink()
    else:
        path(store, 20, name).write_bytes(content)
    assert store.newest() == 10
    assert store.look(20).damage == reason
    assert store.drop_unfinished() == [], "what was whole once is not thrown away in silence"


def test_a_flipped_bit_shows_in_the_digest(store: CheckpointStore) -> None:
    write(store, 10)
    manifest = store.look(10).manifest
    assert manifest is not None
    assert manifest.size_bytes == 110
    assert damage(store.storage, checkpoint_name(10), manifest) is None
    path(store, 10, "__0_0.distcp").write_bytes(b"x" * 50 + b"z" + b"x" * 49)
    assert store.newest() == 10
    found = [damage(store.storage, checkpoint_name(10), manifest, (rank, 2)) for rank in (0, 1)]
    assert sum(each is not None and "__0_0.distcp is not what was written" in each for each in found) == 1
    store.reject(10, "a bit")
    assert store.newest() is None
    assert store.look(10).damage == "a bit"


def test_the_newest_are_kept(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write(store, step)
        store.retain(Retention(newest=2), "loss")
    assert store.steps() == [30, 40]
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == [
        "step-00000030",
        "step-00000040",
    ]


def test_the_best_and_those_for_good_are_kept_beside_them(store: CheckpointStore) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 5.0, 60: 4.0}
    for step, loss in losses.items():
        write(store, step, loss=loss)
        store.retain(Retention(newest=1, best=2, every_steps=50), "loss")
    assert store.steps() == [20, 30, 50, 60]


@given(
    st.dictionaries(
        st.integers(1, 60),
        st.one_of(st.none(), st.floats(-5, 5), st.sampled_from([math.nan, math.inf, -math.inf])),
        min_size=1,
    ),
    st.integers(1, 4),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(1, 20)),
    st.booleans(),
)
def test_what_stays(
    metrics: dict[int, float | None], newest: int, best: int, every: int | None, greater: bool
) -> None:
    stay = Retention(newest, best, every, greater).stay(metrics)
    steps = sorted(metrics)
    assert set(steps[-newest:]) <= stay <= set(steps)
    for step in steps:
        if every and step % every == 0:
            assert step in stay
        elif step not in stay and metrics[step] is not None and math.isfinite(metrics[step]):
            value = metrics[step]
            numbers = [m for m in metrics.values() if m is not None and math.isfinite(m)]
            better = [m for m in numbers if (m >= value if greater else m <= value)]
            assert len(better) > best, "what is no number is better than nothing"
    assert len(stay) <= newest + best + (sum(step % every == 0 for step in steps) if every else 0)


def test_one_that_is_read_stays_until_its_reader_is_done(store: CheckpointStore) -> None:
    write(store, 10)
    with store.reading(10):
        write(store, 20)
        assert store.retain(Retention(newest=1), "loss") == []
        assert store.steps() == [10, 20]
    assert store.retain(Retention(newest=1), "loss") == [10]


def test_damaged_ones_go_when_as_many_good_ones_are_there(store: CheckpointStore) -> None:
    write(store, 10)
    store.reject(10, "a bit")
    write(store, 20)
    assert store.retain(Retention(newest=2), "loss") == [10]
    write(store, 30)
    store.reject(30, "a bit")
    assert store.retain(Retention(newest=2), "loss") == []


def test_a_step_that_is_saved_again_replaces_what_was_there(store: CheckpointStore) -> None:
    write(store, 10)
    store.reject(10, "a bit")
    write(store, 10, commit=False)
    assert store.newest() is None
    assert not path(store, 10, COMMIT_MARKER).exists()
    write(store, 10)
    assert store.newest() == 10


def test_other_files_in_the_directory_do_not_disturb(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    write(store, 5)
    assert store.steps() == [5]
    assert store.drop_unfinished() == []
    assert store.retain(LAST_TEN, "loss") == []


def test_half_a_save_is_dropped_and_one_that_was_committed_stays(store: CheckpointStore) -> None:
    """A rank may die between the commit and the moment when all have heard of it."""
    write(store, 10)
    write(store, 20, commit=False)
    for step in (10, 20, 30):
        store.drop_half(step)
    assert [each.step for each in store.all()] == store.steps() == [10]


def test_a_loss_that_is_no_number_takes_nobodys_place(store: CheckpointStore) -> None:
    retention = Retention(newest=1, best=1)
    for step, loss in {10: 2.0, 20: math.nan, 30: 1.0, 40: math.nan, 50: math.inf}.items():
        write(store, step, loss=loss)
        store.retain(retention, "loss")
    assert store.steps() == [30, 50]
    assert store.ranked(retention, "loss") == [30]
    assert store.ranked(retention, "accuracy") == []


def test_what_is_noted_of_a_checkpoint_is_part_of_it_and_its_files_stay_as_they_were(
    store: CheckpointStore,
) -> None:
    write(store, 10)
    before = store.look(10).manifest
    store.note(10, {"evaluation": {"step": 10, "loss": 1.5}})
    after = store.look(10)
    assert (after.complete, after.evaluation, after.metric("loss")) == (True, {"step": 10, "loss": 1.5}, 1.5)
    assert before is not None
    assert after.manifest is not None
    assert after.manifest.files == before.files
    store.note(20, {"evaluation": {}})  # there is none
    write(store, 30, commit=False)
    store.note(30, {"evaluation": {}})
    assert store.steps() == [10]
