"""A storage that does not answer tells nothing of a checkpoint; and no job begins anew untold."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files import retries
from cluster.files.backend import MissingError, StorageError
from cluster.files.storage import Storage
from infra.lab.faults.troubled_disk import TroubledDisk, missing, troubled_disk
from tests.train_jobs.checkpoint.test_checkpoint_damage import save_two, spoil
from tests.train_jobs.checkpoint.test_checkpoint_matrix import digests, write
from tests.train_jobs.ranks import assemble, run_program, tiny_job, write_corpus
from train_jobs.checkpoint.manifest import COMMIT_MARKER
from train_jobs.checkpoint.restore import restore
from train_jobs.checkpoint.store import REJECTED, CheckpointStore
from train_jobs.data.preparation import prepare_data
from train_jobs.errors import CheckpointError

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

PASSING = ("ESTALE", "EIO", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN")
QUICKLY = (0.0, 0.01, 0.02)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[TroubledDisk]:
    with troubled_disk(tmp_path / "disk") as found:
        yield found


@pytest.fixture
def storage(disk: TroubledDisk, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(retries, "_PAUSES_S", QUICKLY)
    found = Storage(disk.directory / "jobs")
    found.write_bytes("run/file", bytes(range(256)) * 20_000)
    return found


@pytest.mark.parametrize("name", PASSING)
def test_what_a_mounted_disk_does_not_answer_for_a_moment_is_asked_again(
    name: str, disk: TroubledDisk, storage: Storage
) -> None:
    content = bytes(range(256)) * 20_000
    for ask, expected in (
        (lambda: storage.read_bytes("run/file"), content),
        (lambda: storage.size_bytes("run/file"), len(content)),
        (lambda: storage.exists("run/file"), True),
        (lambda: storage.list("run"), ["file"]),
    ):
        disk.trouble(name, times=1)
        assert ask() == expected
    with storage.reader("run/file") as stream:
        assert stream.read(1000) == content[:1000]
        disk.trouble(name, "file", times=1)
        assert stream.read() == content[1000:]
        stream.seek(-10, os.SEEK_END)
        assert stream.read() == content[-10:]


def test_what_lasts_is_the_fault_of_the_storage_and_what_is_clear_is_not_asked_again(
    disk: TroubledDisk, storage: Storage
) -> None:
    disk.trouble("EIO", "file")
    for ask in (storage.read_bytes, storage.size_bytes, storage.exists):
        with pytest.raises(StorageError, match="input/output error"):
            ask("run/file")
    disk.trouble("EACCES", "file", times=1)
    with pytest.raises(StorageError, match="permission denied"):
        storage.read_bytes("run/file")
    assert storage.size_bytes("run/file")
    with pytest.raises(MissingError):
        storage.read_bytes("run/nothing")
    assert errno.ENOENT not in retries._OF_A_MOUNT


class Tries:
    """Restores again and again, after something was done to the checkpoints of steps 4 and 8.

    The files are damaged below the mount, and what is read fails above it.
    """

    def __init__(self, assembly: Any, disk: TroubledDisk) -> None:
        self.assembly = assembly
        self.disk = disk
        self.store = CheckpointStore(Storage(disk.directory / "run" / "checkpoints"))
        self.below = disk.root / "run" / "checkpoints"
        self.kept = disk.root / "kept"
        shutil.copytree(self.below, self.kept)
        self.events: list[str] = []

    def undo(self) -> None:
        self.disk.mend()
        shutil.rmtree(self.below)
        shutil.copytree(self.kept, self.below)
        self.events = []

    def restore(self, **options: Any) -> int | str | None:
        """The step that was loaded, or the name of what was raised."""
        try:
            return restore(self.store, self.assembly.state, self._event, has_saved=lambda: True, **options)
        except (StorageError, CheckpointError) as error:
            return f"{type(error).__name__}: {error}"

    def rejected(self) -> list[int]:
        return [step for step in (4, 8) if (self.below / f"step-{step:08d}" / REJECTED).exists()]

    def _event(self, kind: str, **facts: Any) -> None:
        self.events.append(f"{kind} {facts.get('step', '')}")


def tries_of(config_json: str, mount: str, root: str, control: str) -> Tries:
    retries._PAUSES_S = QUICKLY  # type: ignore[assignment]
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(mount) / "run")
    return Tries(assembly, TroubledDisk(Path(mount), Path(root), Path(control)))


def name_by_name(config_json: str, mount: str, root: str, control: str) -> None:
    tries = tries_of(config_json, mount, root, control)
    disk, newest = tries.disk, tries.below / "step-00000008"
    files = [*(path.name for path in newest.iterdir()), "checkpoints$", "step-00000008$"]
    assert COMMIT_MARKER in files
    for name in PASSING:
        for file in files:
            disk.trouble(name, file, times=2)
            assert (tries.restore(), tries.events) == (8, [])
            disk.trouble(name, file)
            result = tries.restore()
            assert str(result).startswith("StorageError: "), (name, file, result)
            disk.mend()
            assert (tries.restore(), tries.rejected(), tries.events) == (8, [], [])
    for folder in (4, 8):
        spoil(tries.below / f"step-{folder:08d}" / ".metadata", "cut", random.Random(folder))
    result = str(tries.restore())
    assert result.startswith("CheckpointError: no checkpoint in ")
    assert "that of step 8 is damaged (.metadata has " in result
    assert "and so are all before it" in result
    assert "recovery.begin_anew: true" in result
    assert (tries.restore(), tries.rejected()) == (result, [4, 8])  # it says the same at every start
    assert tries.restore(begin_anew=True) is None
    assert tries.events[-1] == "begun_anew "
    shutil.rmtree(tries.below)
    tries.below.mkdir()
    result = str(tries.restore())
    assert result.startswith("CheckpointError: this job has saved checkpoints, and there is none")


def at_random(config_json: str, mount: str, root: str, control: str, out: str, number: int) -> None:
    tries, chance = tries_of(config_json, mount, root, control), random.Random(11)
    found = []
    for _ in range(number):
        spoiled = chance.choice([[], [8], [8], [4], [4, 8]])
        for step in spoiled:
            file = chance.choice([COMMIT_MARKER, ".metadata", "__0_0.distcp"])
            how = chance.choice(["flip a bit", "fill with zeros", "cut", "append"])
            spoil(tries.below / f"step-{step:08d}" / file, how, chance)
        moment = chance.choice([None, 1, 2, 3, 6, 12, 1000])
        if moment is not None:
            paths = chance.choice(["", "checkpoints", "step-", COMMIT_MARKER, "distcp", ".metadata"])
            tries.disk.trouble(chance.choice(PASSING), paths, times=moment)
        results = [tries.restore()]
        states = [digests(tries.assembly)] if isinstance(results[0], int) else [None]
        tries.disk.mend()
        results.append(tries.restore())
        states.append(digests(tries.assembly) if isinstance(results[1], int) else None)
        found.append({"spoiled": spoiled, "troubled": moment, "results": results, "states": states})
        tries.undo()
    write(out, found)


@pytest.fixture
def saved(disk: TroubledDisk, tmp_path: Path) -> tuple[list[str], dict[str, Any]]:
    """Arguments of a program for a run that has saved its steps 4 and 8, and the digests of its states."""
    corpus = write_corpus(tmp_path / "corpus.parquet")
    checkpoint = {"every_steps": 100, "asynchronous": False}
    config = tiny_job(corpus, steps=20, checkpoint=checkpoint)
    run, out = disk.directory / "run", tmp_path / "saved.json"
    prepare_data(config, run / "data")
    run_program(save_two, tmp_path / "logs", 1, config.model_dump_json(), str(run), str(out))
    places = [str(disk.directory), str(disk.root), str(disk._control)]
    return [config.model_dump_json(), *places], json.loads(out.read_text())[0]


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_not_damaged_and_none_is_not_step_0(
    saved: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    run_program(name_by_name, tmp_path / "logs", 1, *saved[0])


MANY = pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("number", [10, MANY])
def test_whatever_is_damaged_and_unreadable_nothing_wrong_is_loaded_and_nothing_begins_anew(
    number: int, saved: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    run_program(at_random, tmp_path / "logs", 1, *saved[0], str(out), number)
    found = json.loads(out.read_text())
    assert len(found) == number
    kinds = set()
    for each in found:
        first, then = each["results"]
        for result, state in zip(each["results"], each["states"], strict=True):
            kinds.add(result if isinstance(result, int) else result.partition(":")[0])
            assert result is not None
            assert state is None or state == saved[1][str(result)]
        # What was unreadable is there again, all of it; what was spoiled is not.
        assert not str(then).startswith("StorageError")
        if each["spoiled"] == []:
            assert then == 8, each
        if each["troubled"] is None:
            assert then == first
    assert kinds == {4, 8, "StorageError", "CheckpointError"}
