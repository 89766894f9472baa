"""The registry: versions, references, many publishers at once, and publishers that are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from datetime import datetime, timedelta
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from cluster.errors import RequestError
from cluster.files.backend import StorageError
from cluster.files.storage import Storage
from cluster.models.registry import Registry

FILES = {
    "config.json": '{"model_type": "llama"}',
    "model.safetensors": "w" * 100_000,
    "sub/tokenizer.json": "{}",
}


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage(tmp_path / "storage")
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    return Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_in(tmp_path / "model")


def model_in(directory: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def files_of(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "shoal.json"
    }


def test_versions_count_from_one_and_hold_the_model_and_where_it_is_from(
    storage: Storage, model: Path, tmp_path: Path
):
    registry = Registry(storage, cache=tmp_path / "cache")
    facts = {"job": "lm-1", "step": 200, "evaluation": {"loss": 2.5}, "config_digest": "abc"}
    first = registry.publish("lm", model, facts)
    second = registry.publish("lm", model_in(tmp_path / "other", {"config.json": "2"}), {})
    assert (first.reference, second.reference) == ("lm@1", "lm@2")
    assert first.path == f"{storage.location}/models/lm/1"
    assert files_of(registry.fetch(first)) == FILES
    assert files_of(registry.fetch(second)) == {"config.json": "2"}
    assert files_of(model) == FILES, "the source was touched"
    record = json.loads((registry.fetch(first) / "shoal.json").read_text())
    assert record.items() >= {**facts, "name": "lm", "version": 1, "created_at": first.created_at}.items()
    assert (first.job, first.step, second.job) == ("lm-1", 200, None)
    assert datetime.fromisoformat(first.created_at).utcoffset() == timedelta(0)


def test_references_name_the_version_they_say(storage: Storage, model: Path):
    registry = Registry(storage)
    for _ in range(11):
        registry.publish("lm", model, {})
    assert [registry.resolve(text).version for text in ("lm", "lm@latest", "lm@11", "lm@2")] == [
        11,
        11,
        11,
        2,
    ]
    assert [version.version for version in registry.versions("lm")] == list(range(1, 12))
    assert {version.version for version in registry.list() if "latest" in version.aliases} == {11}


def test_models_are_listed_by_name_and_version(storage: Storage, model: Path):
    registry = Registry(storage)
    assert registry.list() == []
    for name in ("zebra", "ant", "zebra"):
        registry.publish(name, model, {})
    assert [version.reference for version in registry.list()] == ["ant@1", "zebra@1", "zebra@2"]
    assert registry.names() == ["ant", "zebra"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("stdlib-ml", r"no model 'stdlib-ml' .*did you mean stdlib-lm\?.*published: chat, stdlib-lm"),
        ("xyzzy", "no model 'xyzzy' .*published: chat, stdlib-lm"),
        ("stdlib-lm@3", "no stdlib-lm@3: stdlib-lm has the versions 1, 2 and the alias latest"),
        ("stdlib-lm@prod", "no stdlib-lm@prod: .*the alias latest"),
        ("stdlib-lm@0", "no stdlib-lm@0"),
        ("stdlib-lm@²", "no stdlib-lm@²"),
        ("stdlib-lm@", "write stdlib-lm@latest or stdlib-lm@1"),
        ("@1", "no model ''"),
        ("../chat", "no model '../chat'"),
        (".staging", "no model '.staging'"),
        ("chat\n", "no model"),
    ],
)
def test_a_wrong_reference_is_told_what_there_is(storage: Storage, model: Path, reference: str, message: str):
    registry = Registry(storage)
    for name in ("stdlib-lm", "stdlib-lm", "chat"):
        registry.publish(name, model, {})
    with pytest.raises(RequestError, match=message):
        registry.resolve(reference)


def test_an_empty_registry_says_so(storage: Storage):
    with pytest.raises(RequestError, match=r"nothing is published in .* yet"):
        Registry(storage).resolve("lm@latest")


def test_what_is_no_model_is_not_published(storage: Storage, model: Path, tmp_path: Path):
    registry = Registry(storage)
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "missing", tmp_path / "empty", model / "config.json"):
        with pytest.raises(RequestError, match="is not a directory with files"):
            registry.publish("lm", directory, {})
    for name in ("", "LM", "../lm", "a/b", ".lm", "lm\n", "x" * 64):
        with pytest.raises(RequestError, match="is no name for a model"):
            registry.publish(name, model, {})
    assert registry.list() == []


def test_a_version_that_is_published_again_gets_its_own_record(storage: Storage, model: Path, tmp_path: Path):
    registry = Registry(storage, cache=tmp_path / "cache")
    first = registry.publish("lm", model, {"job": "a", "step": 1})
    again = registry.publish("copy", registry.fetch(first), {"job": "b", "step": 2})
    assert (again.reference, again.job, again.step) == ("copy@1", "b", 2)


def test_a_version_without_its_marker_does_not_exist_and_its_number_is_not_reused(
    storage: Storage, model: Path
):
    registry = Registry(storage)
    storage.write_bytes("models/lm/1/config.json", b"{}")
    with pytest.raises(RequestError, match="nothing is published"):
        registry.resolve("lm")
    assert registry.publish("lm", model, {}).version == 2
    assert [version.version for version in registry.versions("lm")] == [2]


def test_a_damaged_record_is_named(storage: Storage, model: Path):
    registry = Registry(storage)
    registry.publish("lm", model, {})
    storage.write_bytes("models/lm/1/shoal.json", b"{")
    with pytest.raises(StorageError, match=r"models/lm/1/shoal.json is damaged"):
        registry.resolve("lm")


def test_threads_that_publish_at_once_get_versions_of_their_own(storage: Storage, tmp_path: Path):
    registry = Registry(storage, cache=tmp_path / "cache")
    results: dict[int, int] = {}
    barrier = threading.Barrier(6)

    def publish(number: int) -> None:
        directory = model_in(tmp_path / f"model-{number}", {"config.json": str(number)})
        barrier.wait()
        results[number] = registry.publish("lm", directory, {"step": number}).version

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results.values())) == 6
    assert len(registry.versions("lm")) == 6
    for number, version in results.items():
        found = registry.resolve(f"lm@{version}")
        assert found.step == number
        assert files_of(registry.fetch(found)) == {"config.json": str(number)}
    if storage.appendable:
        assert sorted(results.values()) == list(range(1, 7)), "a local storage leaves no number out"


PUBLISHER = """
import sys
from pathlib import Path
from cluster.models.registry import Registry
from cluster.files.storage import Storage
sys.stdin.readline()
for _ in range(3):
    print(Registry(Storage(sys.argv[1])).publish("lm", sys.argv[2], {"job": sys.argv[2]}).version)
"""


def test_eight_processes_that_publish_at_once_get_versions_of_their_own(tmp_path: Path):
    publishers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path / "storage"), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for directory in (model_in(tmp_path / f"m{index}", {"config.json": str(index)}) for index in range(8))
    ]
    try:
        for publisher in publishers:
            assert publisher.stdin is not None
            publisher.stdin.write("go\n")
            publisher.stdin.flush()
        told = [publisher.communicate(timeout=60)[0].split() for publisher in publishers]
    finally:
        for publisher in publishers:
            publisher.kill()
    assert [publisher.returncode for publisher in publishers] == [0] * 8
    assert sorted(int(number) for numbers in told for number in numbers) == list(range(1, 25))
    registry = Registry(Storage(tmp_path / "storage"))
    for index, numbers in enumerate(told):
        for number in numbers:
            version = registry.resolve(f"lm@{number}")
            assert version.job == str(tmp_path / f"m{index}")
            assert files_of(Path(version.path)) == {"config.json": str(index)}
    assert list((tmp_path / "storage" / "models" / ".staging").iterdir()) == []


KILLED_PUBLISHER = """
import json, os, signal, sys
from cluster.models.registry import Registry
from cluster.files.storage import Storage

# Every system call that changes what a reader or another publisher may find.
NAMES = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "open")
calls = 0

def deadly(function, at):
    def wrapper(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapper

for at in range(1, 1000):
    child = os.fork()
    if child == 0:
        for name in NAMES:
            setattr(os, name, deadly(getattr(os, name), at))
        Registry(Storage(sys.argv[1])).publish("lm", sys.argv[2], {"step": at})
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    registry = Registry(Storage(sys.argv[1]))
    print(json.dumps({"at": at, "status": status, "versions": [
        [version.version, version.step] for version in registry.versions("lm")]}), flush=True)
    if status == 0:
        break
    assert status == -signal.SIGKILL
"""


def test_a_publisher_killed_at_any_point_leaves_a_whole_version_or_none(tmp_path: Path, model: Path):
    storage = tmp_path / "storage"
    done = subprocess.run(
        [sys.executable, "-c", KILLED_PUBLISHER, str(storage), str(model)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert rounds[-1]["status"] == 0, done.stderr
    assert len(rounds) > 15, "the kills did not reach the middle"
    assert any(row["versions"] == [] for row in rounds[10:]), "no kill met a copy in the middle"
    # Killed after the rename, a version is whole; before, there is none; numbers have no gaps.
    last = rounds[-1]["versions"]
    assert [number for number, _ in last] == list(range(1, len(last) + 1))
    assert 1 < len(last) < len(rounds) / 2
    registry = Registry(Storage(storage))
    for version in registry.versions("lm"):
        assert files_of(Path(version.path)) == FILES
    assert registry.publish("lm", model, {}).version == len(last) + 1
    assert list((storage / "models" / ".staging").iterdir()) == [], "leftovers stay for ever"


def test_cleaning_spares_the_staged_directory_of_a_living_publisher(tmp_path: Path, model: Path):
    storage = Storage(tmp_path / "storage")
    slow, quick = Registry(storage), Registry(storage)
    real, seen = slow._storage.claim_dir, []

    def interrupted(staged: str, path: str) -> bool:
        if not seen:
            seen.append(quick.publish("lm", model, {"job": "quick"}).version)
        return real(staged, path)

    slow._storage.claim_dir = interrupted  # type: ignore[method-assign]
    version = slow.publish("lm", model, {"job": "slow"})
    assert (seen, version.version, version.job) == ([1], 2, "slow")
    assert files_of(Path(version.path)) == FILES
