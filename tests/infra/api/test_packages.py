"""What travels with a job comes out as it went in; and nothing comes out of it that should not."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from infra.api.packages import KEPT_S, Packages, UnknownPackageError
from train_jobs.driver.package import Package, package_of
from train_jobs.driver.packing import pack


def send(packages: Packages, digest: str, data: bytes, piece: int = 1000) -> int:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), piece):
            yield data[at : at + piece]

    async def take() -> int:
        return await packages.take(digest, chunks())

    return anyio.run(take)


def packed(package: Package) -> tuple[str, bytes]:
    file = io.BytesIO()
    digest = pack(package, file)
    return digest, file.getvalue()


@pytest.fixture
def packages() -> Packages:
    return Packages()


def test_files_come_out_as_they_went_in(tmp_path: Path, packages: Packages) -> None:
    folder = tmp_path / "folder"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "deep" / "er" / "ümlaut – name.txt").write_bytes(os.urandom(70_000))
    (tmp_path / "elsewhere.py").write_text("x = 1\n")
    (folder / "link.py").symlink_to(tmp_path / "elsewhere.py")
    (folder / "empty").write_bytes(b"")
    os.utime(folder / "empty", (1_000_000_000, 1_000_000_000))
    package = package_of(TrainJobConfig(), folder)
    digest, data = packed(package)
    assert send(packages, digest, data) == len(data)
    with packages.opened(digest) as found:
        assert found.files == tuple(sorted(package.files))
        for path in package.files:
            assert (found.base / path).read_bytes() == (folder / path).read_bytes()
        assert (found.base / "run.sh").stat().st_mode & 0o777 == 0o755
        assert (found.base / "empty").stat().st_mtime == 1_000_000_000
        assert not (found.base / "link.py").is_symlink()
        base = found.base
    assert not base.exists()
    packages.drop(digest)
    with pytest.raises(UnknownPackageError, match="send it first"), packages.opened(digest):
        pass


def test_a_job_without_files_has_an_empty_package(packages: Packages) -> None:
    with packages.opened(None) as found:
        assert (found.files, list(found.base.iterdir())) == ((), [])


def archive(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as made:
        fill(made)
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[tarfile.TarFile], None]:
    def fill(made: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        made.addfile(info)

    return fill


@pytest.mark.parametrize(
    "data",
    [
        archive(member("../outside")),
        archive(member("link", tarfile.SYMTYPE, "/etc/passwd")),
        archive(member("link", tarfile.SYMTYPE, "../../outside")),
        archive(member("hard", tarfile.LNKTYPE, "../outside")),
        archive(member("device", tarfile.CHRTYPE)),
        archive(member("pipe", tarfile.FIFOTYPE)),
        b"no archive",
        archive(member("whole"))[:-20],
        b"",
    ],
    ids=["up", "link", "link up", "hard link", "device", "pipe", "text", "cut off", "nothing"],
)
def test_a_package_that_reaches_outside_or_is_none_is_refused(
    data: bytes, tmp_path: Path, packages: Packages
) -> None:
    digest = hashlib.sha256(data).hexdigest()
    send(packages, digest, data)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(RequestError, match=r"cannot be unpacked"), packages.opened(digest):
        pass
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("digest", ["", "..", "A" * 64, "a" * 63, "../" + "a" * 61])
def test_only_a_digest_names_a_package(digest: str, packages: Packages) -> None:
    with pytest.raises(RequestError, match="64 hexadecimal digits"):
        send(packages, digest, b"x")


def is_here(packages: Packages, data: bytes) -> bool:
    try:
        with packages.opened(hashlib.sha256(data).hexdigest()):
            return True
    except UnknownPackageError:
        return False


def test_what_is_not_what_its_digest_says_is_not_kept(packages: Packages) -> None:
    this, that = archive(member("this")), archive(member("that"))
    with pytest.raises(RequestError, match="send it again"):
        send(packages, hashlib.sha256(this).hexdigest(), that)
    assert not is_here(packages, this)
    assert not is_here(packages, that)


def test_a_disk_without_room_is_a_sentence(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive(member("x" * 90))
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb"))
    with pytest.raises(ShoalError, match=r"no room for this package: .*No space left"):
        send(packages, hashlib.sha256(data).hexdigest(), data)
    monkeypatch.undo()
    assert not is_here(packages, data)


def test_what_nobody_takes_goes(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = archive(member("old")), archive(member("new"))
    send(packages, hashlib.sha256(old).hexdigest(), old)
    assert is_here(packages, old)
    later = time.monotonic() + KEPT_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    send(packages, hashlib.sha256(new).hexdigest(), new)
    assert (is_here(packages, old), is_here(packages, new)) == (False, True)


def test_a_package_leaves_no_file_behind(
    packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = archive(member("this"))
    send(packages, hashlib.sha256(data).hexdigest(), data)
    assert is_here(packages, data)
    assert list(tmp_path.iterdir()) == []
