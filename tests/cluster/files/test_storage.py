"""The storage: on this machine's file system, on one that is not local (fsspec's memory), on an S3 server."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from cluster.errors import RequestError, ShoalError
from cluster.files.backend import Entry, MissingError, StorageError
from cluster.files.remote_backend import RemoteBackend
from cluster.files.retries import PatientLocalFile
from cluster.files.storage import Storage
from tests.object_store import faltering, reached, uri
from tests.small_disk import only_small_files


@pytest.fixture(params=["local", "remote", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return Storage(uri(request.getfixturevalue("s3_port"), uuid.uuid4().hex))
    return Storage(tmp_path / "storage") if request.param == "local" else remote_storage()


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with reached() as port:
        yield port


def remote_storage() -> Storage:
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    return Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)


def test_what_was_written_is_read_listed_and_deleted(storage: Storage):
    assert storage.list() == []
    assert not storage.exists("jobs")
    storage.write_bytes("jobs/a/config.yaml", b"x: 1\n")
    storage.write_bytes("jobs/a/config.yaml", b"x: 2\n")
    storage.write_bytes("jobs/b.txt", b"")
    assert storage.read_bytes("jobs/a/config.yaml") == b"x: 2\n"
    assert storage.list() == ["jobs"]
    assert storage.list("jobs") == ["a", "b.txt"]
    assert [(entry.name, entry.is_dir) for entry in storage.entries("jobs")] == [
        ("a", True),
        ("b.txt", False),
    ]
    assert storage.entries("jobs/a") == [Entry("config.yaml", False, 5)]
    assert storage.exists("jobs/a")
    storage.delete("jobs/b.txt")
    storage.delete("jobs/b.txt")
    storage.delete_dir("jobs/a")
    storage.delete_dir("jobs/a")
    assert not storage.exists("jobs/b.txt")
    assert not storage.exists("jobs/a/config.yaml")


def test_a_child_is_the_same_storage_further_down(storage: Storage):
    child = storage.child("jobs", "demo")
    child.write_bytes("note", b"hello")
    assert storage.read_bytes("jobs/demo/note") == b"hello"
    base, _, options = storage.location.partition("?")
    assert child.location.partition("?") == (f"{base}/jobs/demo", "?" if options else "", options)
    assert child.child("deep").location.startswith(f"{base}/jobs/demo/deep")


def test_directories_go_up_and_come_down_whole(storage: Storage, tmp_path: Path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a.bin").write_bytes(os.urandom(3_000_000))
    (source / "sub" / "b.txt").write_text("b")
    (source / "link.txt").symlink_to(source / "sub" / "b.txt")
    storage.upload_dir(source, "models/m")
    storage.download_dir("models/m", tmp_path / "back")
    back = {path.relative_to(tmp_path / "back").as_posix(): path for path in (tmp_path / "back").rglob("*.*")}
    assert back.keys() == {"a.bin", "sub/b.txt", "link.txt"}
    assert back["a.bin"].read_bytes() == (source / "a.bin").read_bytes()
    assert back["link.txt"].read_text() == "b"
    assert not back["link.txt"].is_symlink()


@pytest.mark.parametrize("other", ["local", "remote", "s3"])
def test_what_one_storage_has_another_takes_and_nothing_of_it_touches_a_disk_of_ours(
    storage: Storage, other: str, tmp_path: Path, request: pytest.FixtureRequest
):
    if other == "s3":
        source = Storage(uri(request.getfixturevalue("s3_port"), uuid.uuid4().hex))
    else:
        source = Storage(tmp_path / "other") if other == "local" else remote_storage()
    content = {"a.bin": os.urandom(3_000_000), "sub/.b": b"b", "sub/c": b"", "left/out": b"no"}
    for name, data in content.items():
        source.child("model").write_bytes(name, data)
    with only_small_files(10_000_000 if storage.appendable else 1_000_000):
        storage.copy_dir(source.child("model"), "copy", skip=["left/out"])
    assert storage.files("copy") == ["a.bin", "sub/.b", "sub/c"]
    assert all(storage.read_bytes(f"copy/{name}") == content[name] for name in storage.files("copy"))


@pytest.mark.parametrize("kind", ["remote", "s3"])
def test_a_file_whose_source_breaks_off_is_not_there(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    at_s3 = kind == "s3"
    storage = Storage(uri(request.getfixturevalue("s3_port"), "torn")) if at_s3 else remote_storage()
    source = Storage(tmp_path).child("source")
    source.write_bytes("a.bin", bytes(3_000_000))
    real = PatientLocalFile.readinto

    def broken(file: PatientLocalFile, buffer: Any) -> int:
        if file.tell() >= 1_000_000:
            raise OSError(errno.ENOMEDIUM, "gone")
        return real(file, buffer)

    monkeypatch.setattr(PatientLocalFile, "readinto", broken)
    with pytest.raises(StorageError, match=r"a\.bin.*: gone"):
        storage.copy_dir(source)
    assert storage.files() == []


def test_what_is_written_to_a_store_is_not_kept_in_memory_until_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
):
    class Slow(io.RawIOBase):
        """Keeps what it is given until it is asked to have sent it, as pyarrow does before a slow store."""

        kept = most = 0

        def write(self, data: Any) -> int:
            self.kept += len(data)
            self.most = max(self.most, self.kept)
            return len(data)

        def flush(self) -> None:
            self.kept = 0

    slow = Slow()
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    backend = RemoteBackend("/bucket/slow", filesystem=memory)
    monkeypatch.setattr(backend, "pyarrow", lambda _: (SlowFileSystem(slow), "bucket/slow/file"))
    backend.take(io.BytesIO(bytes(100 << 20)), "file")
    assert 0 < slow.most <= 48 << 20


class SlowFileSystem:
    """Opens the same file again and again."""

    type_name = "s3"

    def __init__(self, stream: io.RawIOBase) -> None:
        self.stream = stream

    def open_output_stream(self, _: str, compression: str | None) -> io.RawIOBase:
        return self.stream


def test_missing_things_are_named(storage: Storage, tmp_path: Path):
    with pytest.raises(MissingError, match="no/such"):
        storage.read_bytes("no/such")
    with pytest.raises(MissingError, match="no/such"):
        storage.download_dir("no/such", tmp_path / "back")
    with pytest.raises(MissingError, match="is not a directory"):
        storage.upload_dir(tmp_path / "nothing", "x")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a/..", "a\0b"])
def test_no_path_leads_out(storage: Storage, path: str):
    for attempt in (
        lambda: storage.write_bytes(path, b""),
        lambda: storage.read_bytes(path),
        lambda: storage.list(path),
        lambda: storage.delete_dir(path),
        lambda: storage.child(path),
    ):
        with pytest.raises(RequestError, match="not a path inside the storage"):
            attempt()


@pytest.mark.parametrize("path", ["", ".", "./"])
def test_the_storage_itself_is_never_deleted(storage: Storage, path: str):
    storage.write_bytes("x", b"")
    with pytest.raises(RequestError, match="itself is not deleted"):
        storage.delete_dir(path)
    assert storage.exists("x")


def test_only_a_local_storage_appends_and_has_paths(tmp_path: Path):
    local, remote = Storage(tmp_path), remote_storage()
    assert (local.appendable, remote.appendable) == (True, False)
    assert local.local_path("a/b") == tmp_path / "a" / "b"
    assert remote.local_path("a/b") is None
    with pytest.raises(StorageError, match="cannot append"):
        remote.append_lines("log", ["x"])
    with pytest.raises(StorageError, match="cannot rename"):
        remote.claim_dir("a", "b")


def test_lines_are_appended_and_a_torn_line_stays_alone(tmp_path: Path):
    storage = Storage(tmp_path)
    storage.append_lines("log", ["1", "2"])
    storage.append_lines("log", [])
    with open(tmp_path / "log", "ab") as file:
        file.write(b'{"step": 3, "lo')
    storage.append_lines("log", ["4"])
    assert storage.read_bytes("log") == b'1\n2\n{"step": 3, "lo\n4\n'


def test_two_who_append_at_once_lose_no_line(tmp_path: Path):
    def append(name: str) -> None:
        for number in range(200):
            Storage(tmp_path).append_lines("log", [f"{name}{number}"])

    threads = [threading.Thread(target=append, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "log").read_text().split()
    assert sorted(lines) == sorted(f"{name}{number}" for name in "abcd" for number in range(200))


def test_a_reader_sees_the_old_or_the_new_file_never_half(tmp_path: Path):
    storage = Storage(tmp_path)
    versions = [bytes([65 + index]) * (200_000 + index) for index in range(4)]
    storage.write_bytes("file", versions[0])
    done = threading.Event()

    def write() -> None:
        for index in range(60):
            storage.write_bytes("file", versions[index % 4])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or reads == 0:
        assert storage.read_bytes("file") in versions
        reads += 1
    writer.join()
    assert sorted(os.listdir(tmp_path)) == [".gitignore", "file"]


KILLED_WRITER = """
import os, signal, sys
from cluster.files.storage import Storage
calls = 0
def deadly(function, at):
    def wrapper(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapper
storage = Storage(sys.argv[1])
for at in range(1, 5):
    if os.fork() == 0:
        os.fsync, os.replace = deadly(os.fsync, at), deadly(os.replace, at)
        storage.write_bytes("file", b"new" * 100_000)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), len(storage.read_bytes("file")), storage.list())
    storage.write_bytes("file", b"old")
"""


def test_a_writer_killed_in_the_middle_leaves_the_old_file(tmp_path: Path):
    Storage(tmp_path).write_bytes("file", b"old")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    # Killed before the data is on the disk, before the rename, before the name is on the disk; then not.
    assert done.stdout.splitlines() == [
        "-9 3 ['file']",
        "-9 3 ['file']",
        "-9 300000 ['file']",
        "0 300000 ['file']",
    ], done.stderr


def test_one_of_two_claims_wins_and_nothing_is_overwritten(tmp_path: Path):
    storage = Storage(tmp_path)
    for name in "ab":
        storage.write_bytes(f"staged-{name}/who", name.encode())
    assert storage.claim_dir("staged-a", "1")
    assert not storage.claim_dir("staged-b", "1")
    assert storage.read_bytes("1/who") == b"a"
    assert storage.read_bytes("staged-b/who") == b"b"


def test_a_directory_of_ours_is_hidden_from_git_and_someone_elses_is_not(tmp_path: Path):
    ours, theirs = Storage(tmp_path / "new"), Storage(tmp_path / "theirs")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "main.py").write_text("")
    assert ours.list() == []
    assert not (tmp_path / "new").exists(), "made by looking"
    for storage in (ours, theirs):
        storage.child("jobs").write_bytes("a", b"")
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / "theirs" / ".gitignore").exists()
    assert ours.list() == ["jobs"]


def test_prepare_leaves_an_empty_directory_that_can_be_written(tmp_path: Path):
    Storage(tmp_path / "a" / "b").prepare()
    assert os.listdir(tmp_path / "a" / "b") == [".gitignore"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="not a directory"):
        Storage(tmp_path / "file").prepare()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "neither a path nor a URI"),
        ("ftp://host/x", "not a location that pyarrow.fs opens"),
        ("shoal-storage://x", "not a location that pyarrow.fs opens"),
        ("s3:/bucket", "must follow the scheme"),
        ("gs://", "must follow the scheme"),
        ("://x", "not a location that pyarrow.fs opens"),
        ("file:relative", "not a file URI"),
    ],
)
def test_a_bad_location_is_a_sentence(location: str, message: str):
    with pytest.raises(RequestError, match=message):
        Storage(location).list()


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for storage in (Storage(tmp_path / "file" / "below"), Storage("/proc/shoal")):
        with pytest.raises(
            ShoalError, match=r"cannot write .*x: (not a directory|no such file|operation not)"
        ):
            storage.write_bytes("x", b"")


def test_a_location_is_the_same_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for location in ("x y", "./x y/", tmp_path / "x y", f"file://{tmp_path}/x%20y"):
        assert Storage(location).location == str(tmp_path / "x y")
    bucket = Storage("s3://bucket/some/where/?region=eu-west-1")
    assert bucket.child("jobs").location == "s3://bucket/some/where/jobs?region=eu-west-1"


def test_files_are_written_bit_by_bit_read_from_anywhere_and_moved(storage: Storage):
    data = os.urandom(11_000_000)  # an object store takes it in several parts
    with storage.writer("checkpoints/one.part") as file:
        for start in range(0, len(data), 1 << 20):
            file.write(memoryview(data)[start : start + (1 << 20)])
    storage.move("checkpoints/one.part", "checkpoints/one")
    assert storage.list("checkpoints") == ["one"]
    assert storage.size_bytes("checkpoints/one") == len(data)
    assert storage.size_bytes("checkpoints/other") is None
    with storage.reader("checkpoints/one") as file:
        file.seek(10_000_000)
        assert file.read() == data[10_000_000:]


def test_a_file_is_kept_as_it_is_whatever_its_name_says(storage: Storage, tmp_path: Path):
    """pyarrow packs, and unpacks, what has such a name, if it is not told otherwise."""
    given = tmp_path / "given"
    given.mkdir()
    names = [
        f"{way}.{ending}" for way in ("bytes", "writer", "copy") for ending in ("gz", "bz2", "zst", "lz4")
    ]
    for name in names:
        data = f"not packed: {name}".encode() * 100
        if name.startswith("copy"):
            (given / name).write_bytes(data)
            storage.upload_dir(given, "kept")
        elif name.startswith("bytes"):
            storage.write_bytes(f"kept/{name}", data)
        else:
            with storage.writer(f"kept/{name}") as file:
                file.write(data)
        assert storage.read_bytes(f"kept/{name}") == data
        assert storage.size_bytes(f"kept/{name}") == len(data)
        with storage.reader(f"kept/{name}") as reader:
            assert reader.read() == data
    storage.download_dir("kept", tmp_path / "back")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        name: f"not packed: {name}".encode() * 100 for name in names
    }


@pytest.mark.slow
def test_requests_that_an_object_store_turns_away_are_made_again(s3_port: int, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(os.urandom(6_000_000))
    with faltering(s3_port) as (port, refused):
        storage = Storage(uri(port, uuid.uuid4().hex))
        storage.write_bytes("note", b"hello")
        storage.upload_dir(tmp_path / "model", "model")
        with storage.writer("stream") as file:
            file.write(os.urandom(6_000_000))
        storage.download_dir("model", tmp_path / "back")
        assert storage.read_bytes("note") == b"hello"
        assert storage.list() == ["model", "note", "stream"]
        storage.delete_dir("model")
        assert storage.list() == ["note", "stream"]
    assert (tmp_path / "back" / "weights").read_bytes() == (tmp_path / "model" / "weights").read_bytes()
    assert len(refused) >= 10, "nothing was turned away"


def test_an_object_store_that_is_not_there_is_a_sentence(s3_port: int):
    with pytest.raises(StorageError, match="cannot write s3://no-such-bucket/x/note"):
        Storage(uri(s3_port, "x").replace("shoal-tests", "no-such-bucket")).write_bytes("note", b"")
