"""Aliases: what they name, who wins, what is refused; promoters at once and promoters that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from cluster.errors import RequestError
from cluster.files.backend import StorageError
from cluster.files.storage import Storage
from cluster.models.registry import Registry
from tests.object_store import CREDENTIALS, object_store, uri

STORED = "models/lm/.aliases"


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """The port of an S3 server; every test has a path of its own in it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with object_store() as port:
            yield port


@pytest.fixture(params=["local", "remote", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage(tmp_path / "storage")
    if request.param == "s3":
        return Storage(uri(request.getfixturevalue("store"), uuid.uuid4().hex))
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    return Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage that several processes can reach."""
    if request.param == "local":
        return str(tmp_path / "storage")
    return uri(request.getfixturevalue("store"), uuid.uuid4().hex)


def registry_of(storage: Storage, directory: Path, versions: int, *names: str) -> Registry:
    """A registry whose models have this many versions each."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    registry = Registry(storage)
    for name in names or ("lm",):
        for step in range(versions):
            registry.publish(name, model, {"step": step})
    return registry


def test_an_alias_names_one_version_until_it_is_promoted_to_another(storage: Storage, tmp_path: Path) -> None:
    registry = registry_of(storage, tmp_path, 2)
    records = [storage.read_bytes(f"models/lm/{number}/shoal.json") for number in (1, 2)]
    assert registry.promote("lm@1", "production").version == 1
    assert registry.resolve("lm@production").reference == "lm@1"
    registry_of(storage, tmp_path, 1)
    assert [registry.resolve(f"lm@{word}").version for word in ("production", "latest")] == [1, 3]
    assert registry.promote("lm@latest", "staging").reference == "lm@3"
    promoted = registry.promote("lm@staging", "production")
    assert (promoted.reference, promoted.step, promoted.aliases) == (
        "lm@3",
        0,
        ("latest", "production", "staging"),
    )
    assert registry.resolve("lm@production") == promoted == registry.resolve("lm")
    assert registry.promote("lm@02", "staging").version == 2
    assert registry.resolve("lm@production").version == 3, (
        "an alias of an alias is a copy, it does not follow"
    )
    assert [version.aliases for version in registry.versions("lm")] == [
        (),
        ("staging",),
        ("latest", "production"),
    ]
    assert [version.aliases for version in registry.list()] == [(), ("staging",), ("latest", "production")]
    assert registry.aliases("lm") == {"production": 3, "staging": 2}
    assert registry.names() == ["lm"]
    assert [storage.read_bytes(f"models/lm/{number}/shoal.json") for number in (1, 2)] == records
    record = json.loads(storage.read_bytes(f"{STORED}/production.json"))
    assert record["version"] == 3
    assert datetime.fromisoformat(record["promoted_at"]).utcoffset() == timedelta(0)


def test_models_have_aliases_of_their_own(storage: Storage, tmp_path: Path) -> None:
    registry = registry_of(storage, tmp_path, 1, "lm", "chat")
    registry.promote("lm@1", "production")
    assert (registry.aliases("lm"), registry.aliases("chat")) == ({"production": 1}, {})
    with pytest.raises(
        RequestError, match=r"no chat@production: chat has the version 1 and the alias latest$"
    ):
        registry.resolve("chat@production")
    for name in ("no-model", "../lm", ".staging", ""):
        assert registry.aliases(name) == {}


@pytest.mark.parametrize("alias", ["a", "v3", "3a", "1.0", "a.json", "blue-green_1", "x" * 63])
def test_names_that_an_alias_can_have(tmp_path: Path, alias: str) -> None:
    registry = registry_of(Storage(tmp_path / "storage"), tmp_path, 2)
    registry.promote("lm@1", alias)
    assert registry.resolve(f"lm@{alias}").aliases == (alias,)


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("latest", "^latest always names the newest version and cannot be promoted to$"),
        ("3", "^'3' is no name for an alias: digits alone are a version"),
        ("007", "digits alone are a version"),
        ("", "^'' is no name for an alias: lower-case letters, digits"),
        ("Production", "^'Production' is no name for an alias: lower-case"),
        ("-x", "with a letter or digit at both ends"),
        ("a/b", "is no name for an alias"),
        ("../x", "is no name for an alias"),
        ("a\n", "is no name for an alias"),
        ("²", "is no name for an alias: lower-case"),
        ("x" * 64, "at most 63"),
    ],
)
def test_names_that_an_alias_cannot_have(tmp_path: Path, alias: str, message: str) -> None:
    registry = registry_of(Storage(tmp_path / "storage"), tmp_path, 1)
    with pytest.raises(RequestError, match=message):
        registry.promote("lm@1", alias)
    assert not (tmp_path / "storage" / STORED).exists()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("lm", r"^'lm' names no version: write lm@2 or lm@latest$"),
        ("lm@", r"^'lm@' names no version: write lm@latest or lm@1$"),
        ("lm@3", r"^there is no lm@3: lm has the versions 1, 2 and the aliases latest, blue, staging$"),
        (
            "lm@stagign",
            r"^there is no lm@stagign \(did you mean lm@staging\?\): .* aliases latest, blue, stag",
        ),
        ("lm@latets", r"\(did you mean lm@latest\?\)"),
        ("lm@xyzzy", r"^there is no lm@xyzzy: lm has"),
        ("lm@" + "9" * 5000, r"^there is no lm@9999"),
        ("lm@a@b", r"^there is no lm@a@b: "),
        ("lm@../1", r"^there is no lm@\.\./1: "),
        ("lmm@1", r"^there is no model 'lmm' .*did you mean lm\?"),
        ("../lm@1", r"^there is no model '\.\./lm'"),
        ("", r"^there is no model ''"),
    ],
)
def test_what_cannot_be_promoted_is_told_what_there_is(
    storage: Storage, tmp_path: Path, reference: str, message: str
) -> None:
    registry = registry_of(storage, tmp_path, 2)
    registry.promote("lm@1", "staging")
    registry.promote("lm@2", "blue")
    with pytest.raises(RequestError, match=message):
        registry.promote(reference, "production")
    assert registry.aliases("lm") == {"blue": 2, "staging": 1}


def test_of_many_aliases_the_first_are_listed(tmp_path: Path) -> None:
    registry = registry_of(Storage(tmp_path / "storage"), tmp_path, 1)
    for number in range(12):
        registry.promote("lm@1", f"a{number:02}")
    with pytest.raises(RequestError, match=r"the aliases latest, a00, .*a08, …$"):
        registry.resolve("lm@zzz")


def test_an_alias_whose_version_was_deleted_says_so_and_can_be_moved(
    storage: Storage, tmp_path: Path
) -> None:
    registry = registry_of(storage, tmp_path, 3)
    registry.promote("lm@2", "production")
    storage.delete_dir("models/lm/2")
    for ask in (registry.resolve, lambda reference: registry.promote(reference, "other")):
        with pytest.raises(
            RequestError,
            match=r"^lm@production names version 2, which is not there any more: lm has the versions 1, 3"
            r" and the alias latest; `shoal promote lm@3 production` lets it name another$",
        ):
            ask("lm@production")
    assert [version.aliases for version in registry.versions("lm")] == [(), ("latest",)]
    assert registry.aliases("lm") == {"production": 2}
    registry.promote("lm@1", "production")
    assert registry.resolve("lm@production").version == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": "2"}', '{"version": 0}', '{"version": true}']
)
def test_a_damaged_alias_is_in_nobody_elses_way(storage: Storage, tmp_path: Path, text: str) -> None:
    registry = registry_of(storage, tmp_path, 2)
    registry.promote("lm@1", "staging")
    storage.write_bytes(f"{STORED}/production.json", text.encode())
    with pytest.raises(
        StorageError, match=r"lm/\.aliases/production\.json.* is damaged .*: promote to production"
    ):
        registry.resolve("lm@production")
    assert [version.aliases for version in registry.versions("lm")] == [("staging",), ("latest",)]
    registry.promote("lm@2", "production")
    assert registry.resolve("lm@production").version == 2


def test_files_that_are_no_aliases_are_not_taken_for_some(storage: Storage, tmp_path: Path) -> None:
    registry = registry_of(storage, tmp_path, 2)
    for name in ("latest.json", "1.json", "notes.txt", "Big.json", ".production.json.1234"):
        storage.write_bytes(f"{STORED}/{name}", b'{"version": 1}')
    assert registry.aliases("lm") == {}
    assert [registry.resolve(f"lm@{word}").version for word in ("latest", "1")] == [2, 1]


def test_a_storage_that_cannot_be_read_has_not_lost_its_aliases(tmp_path: Path) -> None:
    registry = registry_of(Storage(tmp_path / "storage"), tmp_path, 1)
    registry.promote("lm@1", "production")
    path = tmp_path / "storage" / STORED / "production.json"
    path.unlink()
    path.mkdir()
    for ask in (lambda: registry.resolve("lm@production"), lambda: registry.versions("lm")):
        with pytest.raises(StorageError, match=r"cannot read .*production\.json: .*directory"):
            ask()


PROMOTER = """
import sys
from cluster.models.registry import Registry
from cluster.files.storage import Storage
registry = Registry(Storage(sys.argv[1]))
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    registry.promote(f"lm@{sys.argv[2]}", "production")
    print(sys.argv[2], flush=True)
"""


def promoter(location: str, version: int, times: int) -> subprocess.Popen[str]:
    """A process that promotes to lm@production once it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-c", PROMOTER, location, str(version), str(times)],
        env={**os.environ, **CREDENTIALS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_two_processes_that_promote_at_once_leave_one_of_their_versions(
    location: str, tmp_path: Path
) -> None:
    registry = registry_of(Storage(location), tmp_path, 3)
    registry.promote("lm@1", "production")
    promoters = [promoter(location, version, 20) for version in (2, 3)]
    try:
        for process in promoters:
            start(process)
        seen = []
        while any(process.poll() is None for process in promoters):
            seen.append(registry.resolve("lm@production").version)
            shown = [version.aliases for version in registry.versions("lm")]
            assert sum("production" in aliases for aliases in shown) == 1, shown
            if len(seen) <= 3:
                registry_of(Storage(location), tmp_path, 1)
        told = [process.communicate(timeout=60)[0].split() for process in promoters]
    finally:
        for process in promoters:
            process.kill()
    assert told == [["2"] * 20, ["3"] * 20]
    assert set(seen) <= {1, 2, 3}
    assert len(seen) > 2, "nobody read meanwhile"
    assert registry.resolve("lm@production").version in (2, 3)
    assert registry.promote("lm@1", "production").version == 1
    assert registry.resolve("lm@production").version == 1, "the last one wins"
    assert [version.version for version in registry.versions("lm")] == [1, 2, 3, 4, 5, 6]


class Overtaken:
    """A registry of lm@1 whose reads are counted: right after one of them, lm@2 is published and promoted."""

    def __init__(self, place: Storage, directory: Path, at: int) -> None:
        registry_of(place, directory, 1).promote("lm@1", "production")
        self.registry = Registry(place)
        self.reads: list[str] = []
        self._place, self._directory, self._at = place, directory, at
        storage = self.registry._storage
        for name in ("list", "exists", "read_bytes"):
            setattr(storage, name, partial(self._read, getattr(storage, name)))

    def _read(self, read: Callable[[str], Any], path: str) -> Any:
        found = read(path)
        self.reads.append(path)
        if len(self.reads) == self._at:
            registry_of(self._place, self._directory, 1).promote("lm@2", "production")
        return found


@pytest.mark.parametrize("reference", ["lm@production", "lm@latest", "lm@1"])
def test_a_reader_that_is_overtaken_at_any_point_finds_the_old_alias_or_the_new(
    tmp_path: Path, reference: str
) -> None:
    for at in range(1, 1000):
        overtaken = Overtaken(Storage(tmp_path / f"storage-{at}"), tmp_path, at)
        resolved = overtaken.registry.resolve(reference)
        shown = [alias for version in overtaken.registry.versions("lm") for alias in version.aliases]
        assert resolved.version in ({1} if reference == "lm@1" else {1, 2})
        assert sorted(shown) == ["latest", "production"], overtaken.reads[:at]
        if len(overtaken.reads) < at:
            break
    assert at > 8


def test_promoters_that_are_killed_leave_an_alias_that_can_be_read(location: str, tmp_path: Path) -> None:
    registry = registry_of(Storage(location), tmp_path, 3)
    registry.promote("lm@1", "production")
    for number in range(6):
        process = promoter(location, 2 + number % 2, 100_000)
        try:
            start(process)
            assert process.stdout is not None
            process.stdout.readline()  # it is at work
            time.sleep(0.003 * number)  # and meets its end at different points of it
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
        assert registry.resolve("lm@production").version == 2 + number % 2
    assert registry.aliases("lm").keys() == {"production"}
    registry.promote("lm@1", "production")
    assert registry.resolve("lm@production").version == 1


KILLED_PROMOTER = """
import builtins, json, os, signal, sys
from cluster.models.registry import Registry
from cluster.files.storage import Storage

# Every system call that changes what a reader may find.
NAMES = ("fsync", "replace", "rename", "mkdir", "unlink", "open")
calls = 0

def deadly(function, at):
    def wrapper(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapper

def version_of_alias(default):
    return Registry(Storage(sys.argv[1])).aliases("lm").get("production", default)

before = version_of_alias(0)
for at in range(1, 1000):
    wanted = 1 + at % 3
    child = os.fork()
    if child == 0:
        for name in NAMES:
            setattr(os, name, deadly(getattr(os, name), at))
        builtins.open = deadly(open, at)
        Registry(Storage(sys.argv[1])).promote(f"lm@{wanted}", "production")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    after = version_of_alias(0)
    print(json.dumps({"status": status, "before": before, "wanted": wanted, "after": after}), flush=True)
    before = after
    if status == 0:
        break
    assert status == -signal.SIGKILL
"""


@pytest.mark.parametrize("first", [True, False], ids=["the first promotion", "a later one"])
def test_a_promoter_killed_at_any_point_leaves_the_old_alias_or_the_new(tmp_path: Path, first: bool) -> None:
    storage = tmp_path / "storage"
    registry = registry_of(Storage(storage), tmp_path, 3)
    if not first:
        registry.promote("lm@1", "production")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_PROMOTER, str(storage)], capture_output=True, text=True, timeout=120
    )
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert rounds[-1]["status"] == 0, done.stderr
    outcomes = []
    for row in rounds:
        assert row["after"] in (row["before"], row["wanted"]), row
        outcomes.append(row["after"] == row["wanted"])
    # Killed before the rename there is the old one, after it the new one.
    assert len(outcomes) > 4, "the kills did not reach the middle"
    assert outcomes[0] is False
    assert (outcomes[-1], outcomes[-2]) == (True, True), "no kill came after the rename"
    assert registry.resolve("lm@production").version == rounds[-1]["wanted"]
    assert list(registry.aliases("lm")) == ["production"]
    assert len(registry.versions("lm")) == 3
