"""Logs of lines: written by somebody who may hang, read by somebody who comes back."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from cluster.files import line_reader, line_writer
from cluster.files.backend import StorageError
from cluster.files.line_reader import LineReader, newest_first, read_lines
from cluster.files.line_writer import LineWriter
from cluster.files.storage import Storage


def object_store() -> Storage:
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    return Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)


@pytest.fixture(params=["directory", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    monkeypatch.setattr(line_writer, "PART_PAUSE_S", 0.01)
    return Storage(tmp_path) if request.param == "directory" else object_store()


def numbers(storage: Storage, log: str = "log") -> list[int]:
    return [line["n"] for line in read_lines(storage, log)]


def lines(*which: int) -> list[dict[str, Any]]:
    return [{"n": number} for number in which]


def test_lines_of_two_logs_are_read_back_in_their_order(storage: Storage) -> None:
    writer = LineWriter(storage)
    for number in range(100):
        writer.add("log" if number % 3 else "other", lines(number))
    assert writer.written(10.0)
    assert numbers(storage) == [number for number in range(100) if number % 3]
    assert numbers(storage, "other") == list(range(0, 100, 3))
    assert numbers(storage, "none") == []


def test_a_writer_that_comes_later_goes_on_and_overwrites_nothing(storage: Storage) -> None:
    first, second = LineWriter(storage), LineWriter(storage)
    first.add("log", lines(1))
    assert first.written(10.0)
    second.add("log", lines(2))
    assert second.written(10.0)
    first.add("log", lines(3))  # who was taken for dead writes once more
    assert first.written(10.0)
    assert sorted(numbers(storage)) == [1, 2, 3]


def test_a_reader_is_given_each_line_once_whenever_it_looks(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "PART_BYTES", 100)
    draw = random.Random(7)
    writer, reader = LineWriter(storage), LineReader(storage, "log")
    found: list[int] = []
    written = 0
    while written < 200:
        batch = draw.randrange(12)
        writer.add("log", lines(*range(written, written + batch)))
        written += batch
        if draw.random() < 0.5:
            assert writer.written(10.0)
            found += [line["n"] for line in reader.new()]
            assert found == list(range(written))
        else:
            found += [line["n"] for line in reader.new()]
            assert found == list(range(len(found)))
    assert writer.written(10.0)
    found += [line["n"] for line in reader.new()]
    assert found == list(range(written))
    assert reader.new() == []


def test_only_the_newest_part_is_written_again_and_only_what_changed_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_writer, "PART_BYTES", 200)
    storage = object_store()
    moved: list[tuple[str, str, int]] = []
    write, read = storage.write_bytes, storage.read_bytes

    def writes(path: str, data: bytes) -> None:
        moved.append(("write", path, len(data)))
        write(path, data)

    def reads(path: str, start: int = 0) -> bytes:
        data = read(path, start)
        moved.append(("read", path, len(data)))
        return data

    monkeypatch.setattr(storage, "write_bytes", writes)
    monkeypatch.setattr(storage, "read_bytes", reads)
    writer, reader = LineWriter(storage), LineReader(storage, "log")
    for number in range(100):
        writer.add("log", lines(number))
        assert writer.written(10.0)
        reader.new()
    most = 200 + len('{"n": 99}\n')
    assert max(size for _, _, size in moved) <= most
    assert len([1 for what, _, _ in moved if what == "read"]) <= 101
    assert len({path for what, path, _ in moved if what == "write"}) > 4


class Hanging(Storage):
    """A mounted disk that does not answer until it is let go."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.go_on = threading.Event()

    def append_lines(self, path: str, lines: Iterable[str]) -> None:
        self.go_on.wait(60.0)
        super().append_lines(path, lines)


def test_nobody_waits_for_a_storage_that_hangs_and_nothing_is_lost(tmp_path: Path) -> None:
    storage = Hanging(tmp_path)
    writer = LineWriter(storage)
    began = time.monotonic()
    for number in range(20_000):
        writer.add("log", lines(number))
    assert time.monotonic() - began < 5
    assert not writer.written(0.05)
    assert writer.trouble is None, "it hangs, and has not failed"
    storage.go_on.set()
    assert writer.written(30.0)
    assert numbers(storage) == list(range(20_000))


def test_of_too_many_lines_the_oldest_of_the_longest_log_are_lost_and_counted(tmp_path: Path) -> None:
    storage = Hanging(tmp_path)
    writer = LineWriter(storage, most_unwritten=10)
    writer.add("events", lines(0))
    for number in range(15):
        writer.add("log", lines(number))
    storage.go_on.set()
    assert writer.written(10.0)
    assert numbers(storage, "events") == [0]
    # What was on its way when others were lost arrives all the same.
    assert numbers(storage)[-9:] == list(range(6, 15))
    assert writer.lost == 6


def test_whoever_is_impatient_hears_of_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    (tmp_path / "log.jsonl").mkdir()
    writer = LineWriter(Storage(tmp_path))
    writer.add("log", lines(1))
    began = time.monotonic()
    assert not writer.written(60.0, patient=False)
    assert time.monotonic() - began < 10
    assert "cannot append to" in str(writer.trouble)
    (tmp_path / "log.jsonl").rmdir()
    assert writer.written(10.0)
    assert writer.trouble is None


def test_who_waits_for_an_answer_waits_for_no_storage_that_fails(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    writer = LineWriter(Storage(tmp_path))
    for number in range(3):
        writer.add("log", lines(number))
        began = time.monotonic()
        assert not writer.answered(60.0)
        assert time.monotonic() - began < line_writer.RETRY_S / 2
    (tmp_path / "log.jsonl").rmdir()
    assert writer.written(10.0)
    writer.add("log", lines(3))
    assert writer.answered(10.0)
    assert numbers(Storage(tmp_path)) == [0, 1, 2, 3]


def test_a_failure_that_began_before_is_not_what_the_impatient_hear_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    began, fails = threading.Event(), threading.Event()

    class Recovering(Storage):
        def append_lines(self, path: str, lines: Iterable[str]) -> None:
            if not began.is_set():
                began.set()
                fails.wait(60.0)
                raise StorageError("no room")
            super().append_lines(path, lines)

    writer = LineWriter(Recovering(tmp_path))
    writer.add("log", lines(1))
    assert began.wait(60.0)
    threading.Timer(0.2, fails.set).start()
    assert writer.written(60.0, patient=False)
    assert numbers(Storage(tmp_path)) == [1]


def test_a_directory_that_is_away_is_not_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    place, away = tmp_path / "run", tmp_path / "away"
    writer = LineWriter(Storage(place))
    writer.add("log", lines(1))
    assert writer.written(10.0), "the first write makes it"
    place.rename(away)
    writer.add("log", lines(2))
    assert not writer.written(0.1)
    assert not place.exists()
    away.rename(place)
    assert writer.written(10.0)
    assert numbers(Storage(place)) == [1, 2]


def test_lines_that_were_cut_off_spoil_none_and_one_that_is_being_written_is_waited_for(
    tmp_path: Path,
) -> None:
    reader = LineReader(Storage(tmp_path), "log")
    assert reader.new() == []
    with (tmp_path / "log.jsonl").open("wb") as log:
        log.write(b'{"n": 1}\n{"n": \n[]\n\xff\xfe\n{"n": 2}\n{"n"')
        log.flush()
        assert reader.new() == lines(1, 2)
        assert reader.new() == []
        log.write(b": 3}\n")
        log.flush()
        assert reader.new() == lines(3)


def test_what_an_older_version_wrote_whole_is_read_before_the_parts() -> None:
    storage = object_store()
    storage.write_bytes("log.jsonl", b'{"n": 1}\n{"n": 2}\n')
    reader = LineReader(storage, "log")
    assert reader.new() == lines(1, 2)
    assert reader.new() == []
    writer = LineWriter(storage)
    writer.add("log", lines(3))
    assert writer.written(10.0)
    assert reader.new() == lines(3)
    assert numbers(storage) == [1, 2, 3]


def test_what_could_not_be_read_is_read_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = object_store()
    for number in (1, 2):
        LineWriter(storage).add("log", lines(number))
    deadline = time.monotonic() + 10
    while len(storage.list("log")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    read, broken = storage.read_bytes, sorted(storage.list("log"))[1]

    def fails(path: str, start: int = 0) -> bytes:
        if path.endswith(broken):
            raise StorageError("not now")
        return read(path, start)

    reader = LineReader(storage, "log")
    monkeypatch.setattr(storage, "read_bytes", fails)
    with pytest.raises(StorageError):
        reader.new()
    monkeypatch.undo()
    assert sorted(line["n"] for line in reader.new()) == [1, 2]


def test_a_writer_that_is_closed_has_written_what_it_had(storage: Storage) -> None:
    writer = LineWriter(storage)
    writer.add("log", lines(*range(50)))
    writer.close()
    assert numbers(storage) == list(range(50))


@pytest.mark.parametrize("block_bytes", [1, 7, 50, 1 << 20])
def test_lines_are_read_from_the_end_on_whatever_block_or_part_they_are_in(
    block_bytes: int, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_reader, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(line_writer, "PART_BYTES", 30)
    assert list(newest_first(storage, "log")) == []
    writer = LineWriter(storage)
    for number in range(20):
        writer.add("log", [{"n": number, "text": "ü" * (number % 5)}])
        assert number % 3 or writer.written(10.0)
    assert writer.written(10.0)
    assert list(newest_first(storage, "log")) == read_lines(storage, "log")[::-1]
    assert [line["n"] for line in newest_first(storage, "log")] == list(range(20))[::-1]


def test_what_was_cut_off_is_left_out_from_the_end_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_reader, "_BLOCK_BYTES", 4)
    (tmp_path / "log.jsonl").write_bytes(b'{"n": 1}\n{"n": \n[]\n\xff\xfe\n\n{"n": 2}\n{"n"')
    assert list(newest_first(Storage(tmp_path), "log")) == lines(2, 1)


def test_from_the_end_on_no_more_parts_are_read_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "PART_BYTES", 30)
    storage = object_store()
    writer = LineWriter(storage)
    for number in range(30):
        writer.add("log", lines(number))
        assert writer.written(10.0)
    read: list[str] = []
    whole = storage.read_bytes

    def reads(path: str, start: int = 0) -> bytes:
        read.append(path)
        return whole(path, start)

    monkeypatch.setattr(storage, "read_bytes", reads)
    assert [line["n"] for line in islice(newest_first(storage, "log"), 4)] == [29, 28, 27, 26]
    assert len(read) <= 2 < len(storage.list("log"))
