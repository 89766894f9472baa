"""What of a folder travels with a job, and what is said of the rest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from train_jobs.driver import package as module
from train_jobs.driver.package import package_of


def write(base: Path, *paths: str, size: int = 1) -> None:
    for path in paths:
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_bytes(b"x" * size)


def job(**changes: Any) -> TrainJobConfig:
    return TrainJobConfig.model_validate(changes)


def script(*arguments: Any, **changes: Any) -> TrainJobConfig:
    return job(task="script", script="train.py", arguments=list(arguments), **changes)


def test_all_travels_that_nobody_leaves_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        "shoal.yaml",
        "train.py",
        "lib/model.py",
        ".git/HEAD",
        "lib/__pycache__/model.pyc",
        ".hidden",
    )
    os.symlink("train.py", tmp_path / "link.py")
    os.mkfifo(tmp_path / "pipe")
    package = package_of(job(), tmp_path)
    assert package.files == (".hidden", "lib/model.py", "link.py", "shoal.yaml", "train.py")
    assert package.left_out == {}
    assert package.sentences() == ["5 files travel, 0 KiB"]
    package.copy(tmp_path.parent / "copy")
    assert (tmp_path.parent / "copy" / "link.py").read_bytes() == b"x"


def test_links_are_followed_and_what_leads_nowhere_is_said(tmp_path: Path) -> None:
    base = tmp_path / "project"
    write(
        tmp_path, "disk/corpus/train.bin", "disk/corpus/deep/x.bin", "project/a/b/one.py", "project/c/two.py"
    )
    os.symlink("../disk/corpus", base / "data")
    os.symlink("nowhere", base / "dangling")
    os.symlink("../..", base / "a" / "b" / "up")
    os.symlink("../c", base / "a" / "there")
    os.symlink("../a", base / "c" / "back")
    package = package_of(script("--data=data"), base)
    loops = [f"{way}/{end}" for way, end in (("a/b", "up"), ("a/there", "back"), ("c/back/b", "up"))]
    assert set(package.files) == {
        *("a/b/one.py", "c/two.py", "data/train.bin", "data/deep/x.bin", "a/there/two.py", "c/back/b/one.py"),
    }
    assert package.left_out == {
        "Shoal: a link that leads nowhere": ["dangling"],
        "Shoal: a link to a folder that it lies in": [*loops, "c/back/there"],
    }
    (base / ".gitignore").write_text("/data\n")
    assert "data/deep/x.bin" in package_of(script("--data=data"), base).files
    without = package_of(script(), base)
    assert (without.left_out[".gitignore"], "data/train.bin" in without.files) == (["data"], False)
    package.copy(tmp_path / "copy")
    assert (tmp_path / "copy" / "data" / "deep" / "x.bin").read_bytes() == b"x"


def test_the_program_travels_whatever_git_ignores(tmp_path: Path) -> None:
    write(tmp_path, "lib/__init__.py", "lib/my/task.py", "lib/my/other.py", "sub/main.py", "sub/data/x.bin")
    (tmp_path / ".gitignore").write_text("lib/\nmain.py\ndata\n")
    package = package_of(job(task="lib.my.task:Task"), tmp_path)
    assert set(package.files) == {".gitignore", "lib/__init__.py", "lib/my/task.py"}
    assert package.left_out[".gitignore"] == ["lib/my/other.py", "sub/data", "sub/main.py"]
    module = {"task": "script", "module": "main", "cwd": "sub", "arguments": ["data"]}
    package = package_of(job(**module), tmp_path)
    assert set(package.files) == {".gitignore", "sub/main.py", "sub/data/x.bin"}


def test_files_of_patterns_hold_below_their_own_directory(tmp_path: Path) -> None:
    write(
        tmp_path, "a.log", "data/train.bin", "sub/a.log", "sub/keep.log", "sub/deep/x.tmp", "x.tmp", "big.pt"
    )
    (tmp_path / ".gitignore").write_text("data/\n*.log\n# a comment\n")
    (tmp_path / "sub" / ".gitignore").write_text("*.tmp\n")
    (tmp_path / ".shoalignore").write_text("/big.pt\n")
    package = package_of(job(), tmp_path)
    assert set(package.files) == {".gitignore", ".shoalignore", "sub/.gitignore", "x.tmp"}
    assert package.left_out == {
        ".gitignore": ["a.log", "data", "sub/a.log", "sub/keep.log"],
        ".shoalignore": ["big.pt"],
        "sub/.gitignore": ["sub/deep/x.tmp"],
    }
    assert "left out by .gitignore: a.log, data, sub/a.log, sub/keep.log" in package.sentences()


def test_a_script_gets_what_it_names_whatever_git_ignores(tmp_path: Path) -> None:
    write(
        tmp_path, "train.py", "data/train.bin", "data/more/x.bin", "conf/a.json", "out/old.pt", "weights.pt"
    )
    (tmp_path / ".gitignore").write_text("data\nconf\nout\n*.pt\n")
    arguments = ("--data=data", "--config", "conf/a.json", "--out", "elsewhere", 3, "../outside", "/abs", ".")
    package = package_of(script(*arguments), tmp_path)
    assert set(package.files) == {
        ".gitignore",
        "train.py",
        "data/train.bin",
        "data/more/x.bin",
        "conf/a.json",
    }
    assert package.left_out == {".gitignore": ["out", "weights.pt"]}
    package = package_of(script(*arguments, exclude=["data/more"]), tmp_path)
    assert "data/more/x.bin" not in package.files
    assert package.left_out["exclude"] == ["data/more"]


def test_what_the_config_names_by_its_path_is_read_where_it_lies(tmp_path: Path) -> None:
    write(
        tmp_path, "shoal.yaml", "corpus/a.parquet", "model/config.json", "shoal-storage/jobs/j/metrics.jsonl"
    )
    config = job(data={"source": str(tmp_path / "corpus")}, model={"directory": str(tmp_path / "model")})
    package = package_of(config, tmp_path, [tmp_path / "shoal-storage"])
    assert package.files == ("shoal.yaml",)
    assert package.left_out == {
        "the config, which names it by its path": ["corpus", "model"],
        "Shoal: its storage": ["shoal-storage"],
    }


def test_patterns_and_uris_of_files_are_read_where_they_lie_too(tmp_path: Path) -> None:
    write(tmp_path, "project/data/train-0.parquet", "project/data/train-1.parquet", "project/data/words.txt")
    write(tmp_path, "project/held out/a.parquet")
    os.symlink("project", tmp_path / "link")
    base = tmp_path / "link"
    data = {"source": f"{base}/data/train-*", "held_out_source": f"file://{base}/held%20out/a.parquet"}
    package = package_of(job(data=data), base)
    assert package.files == ("data/words.txt",)
    assert package.left_out == {
        "the config, which names it by its path": [
            "data/train-0.parquet",
            "data/train-1.parquet",
            "held out/a.parquet",
        ]
    }


def test_a_folder_that_is_too_large_is_told_with_what_is_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 3 * 2**20)
    write(tmp_path, "data/a.bin", "data/b.bin", "weights.pt", size=2**21)
    write(tmp_path, "train.py")
    with pytest.raises(
        RequestError, match=r"6 MiB in 4 files, of at most 3\..* data \(4 MiB\), weights.pt \(2 MiB\)"
    ):
        package_of(job(), tmp_path).check()
    (tmp_path / ".shoalignore").write_text("data\n")
    package_of(job(), tmp_path).check()


def test_what_shoal_knows_of_clusters_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be a home: there lie tokens, and what travelled before."""
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("train.py", ".local/state/shoal/lab/token", ".config/shoal/contexts.json", ".config/mine"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    package = package_of(job(), tmp_path)
    assert package.files == (".config/mine", "train.py")
    assert package.left_out == {"Shoal: its own": [".config/shoal", ".local/state/shoal"]}
