"""The log of events: its numbers, its file, and a storage that fails."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from cluster.files import line_writer
from cluster.files.storage import Storage
from cluster.sharing import journal as module
from cluster.sharing.events import Event
from cluster.sharing.journal import EVENTS, Journal, journal_storage, read_events


def memory_store() -> fs.FileSystem:
    return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))


def event(number: int) -> Event:
    return Event("held", f"number {number}", "job/a", "training", {"CPU": 1}, {}, {}, {"worker-1": number})


def write(storage: Storage, *numbers: int, at: float = 1000.0) -> Journal:
    journal = Journal(storage, clock=lambda: at)
    journal.add(event(number) for number in numbers)
    assert journal.flushed()
    return journal


def test_events_are_numbered_stamped_kept_and_written(tmp_path: Path):
    storage = journal_storage(str(tmp_path), "demo")
    journal = write(storage, 1, 2, at=1_700_000_000.5)
    (first, second) = read_events(storage)
    assert first == {
        "seq": 1,
        "epoch": 1_700_000_000,
        "time": "2023-11-14T22:13:20.500+00:00",
        "cause": "held",
        "holder": "job/a",
        "kind": "training",
        "unit": {"CPU": 1},
        "before": {},
        "after": {},
        "held": {"worker-1": 1},
        "starting": {},
        "by": [],
        "reason": "number 1",
    }
    assert journal.after(None) == [first, second]
    assert journal.after((first["epoch"], 1)) == [second]
    assert journal.after(None, most=1) == [second]
    assert (tmp_path / "sharing" / "demo" / f"{EVENTS}.jsonl").read_text().count("\n") == 2


def test_numbers_and_memory_go_on_after_a_restart_whatever_the_clock_says(tmp_path: Path):
    storage = Storage(tmp_path)
    write(storage, 1, 2, at=5000.0)
    again = write(storage, 3, at=100.0)
    assert [(line["seq"], line["epoch"]) for line in read_events(storage)] == [
        (1, 5000),
        (2, 5000),
        (3, 5001),
    ]
    assert [line["seq"] for line in again.after((5000, 2))] == [3]
    assert [line["seq"] for line in again.after(None)] == [1, 2, 3]


def test_a_line_that_was_cut_off_is_left_out_and_spoils_none_after_it(tmp_path: Path):
    storage = Storage(tmp_path)
    write(storage, 1, 2)
    path = tmp_path / f"{EVENTS}.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    write(storage, 3, at=2000.0)
    assert [line["reason"] for line in read_events(storage)] == ["number 1", "number 3"]


def test_a_storage_that_fails_is_tried_again_and_nothing_waits_for_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    storage = Storage(tmp_path)
    (tmp_path / f"{EVENTS}.jsonl").mkdir()  # no file can be written there, not even by root
    journal = Journal(storage)
    journal.add([event(1)])
    assert not journal.flushed(timeout_s=0.1)
    assert journal.trouble is not None
    assert [line["reason"] for line in journal.after(None)] == ["number 1"]
    (tmp_path / f"{EVENTS}.jsonl").rmdir()
    journal.add([event(2)])
    assert journal.flushed()
    assert journal.trouble is None
    assert [line["seq"] for line in read_events(storage)] == [1, 2]


def test_what_waits_for_the_storage_is_bounded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "MOST_UNWRITTEN", 3)
    (tmp_path / f"{EVENTS}.jsonl").mkdir()
    journal = Journal(Storage(tmp_path))
    for number in range(6):
        journal.add([event(number)])
    (tmp_path / f"{EVENTS}.jsonl").rmdir()
    assert journal.flushed()
    assert [line["seq"] for line in read_events(Storage(tmp_path))] == [4, 5, 6]


def test_where_nothing_can_be_appended_the_newest_are_found_over_several_parts(monkeypatch):
    monkeypatch.setattr(line_writer, "PART_BYTES", 1)
    storage = Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory_store())
    journal = write(storage, 1)
    journal.add([event(2)])
    assert journal.flushed()
    assert len(storage.list(EVENTS)) == 2
    again = write(storage, 3, at=2000.0)
    assert [line["seq"] for line in read_events(storage)] == [1, 2, 3]
    assert [line["seq"] for line in again.after(None)] == [1, 2, 3]


def test_a_closed_journal_has_written_what_it_had(tmp_path: Path):
    journal = Journal(Storage(tmp_path))
    journal.add(event(number) for number in range(100))
    journal.close()
    lines = (tmp_path / f"{EVENTS}.jsonl").read_text().splitlines()
    assert [json.loads(line)["held"]["worker-1"] for line in lines] == list(range(100))


def test_a_place_for_the_log_that_is_not_there_yet_is_no_hindrance(tmp_path: Path):
    storage = Storage(tmp_path / "not" / "yet")
    assert read_events(storage) == []
    write(storage, 1)
    assert len(read_events(storage)) == 1


@pytest.mark.parametrize("rubbish", [b"\n\n", b"[]\n{}\n", b"\xff\xfe\n", b'{"seq": 1}\n'])
def test_rubbish_in_the_file_is_passed_over(tmp_path: Path, rubbish: bytes):
    (tmp_path / f"{EVENTS}.jsonl").write_bytes(rubbish)
    write(Storage(tmp_path), 1)
    assert [line["reason"] for line in read_events(Storage(tmp_path))] == ["number 1"]
