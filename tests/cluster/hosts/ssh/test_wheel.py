"""The wheel that hosts get is this very Shoal."""

from __future__ import annotations

import importlib.metadata
import io
import subprocess
import sys
import zipfile
from pathlib import Path

from cluster.hosts.ssh.wheel import PACKAGES, this_wheel, versions_here


def test_it_installs_and_is_what_is_here(tmp_path: Path) -> None:
    wheel = this_wheel()
    file = tmp_path / wheel.file_name
    file.write_bytes(wheel.content)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    done = subprocess.run([*pip, "--target", tmp_path / "there", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    root = Path(__file__).parents[4]
    for package in PACKAGES:
        here = {path.relative_to(root) for path in (root / package).rglob("*") if path.is_file()}
        here = {path for path in here if "__pycache__" not in path.parts}
        assert {path for path in here if not (tmp_path / "there" / path).exists()} == set()
    (installed,) = importlib.metadata.distributions(name="shoal", path=[str(tmp_path / "there")])
    assert installed.version == importlib.metadata.version("shoal")
    assert installed.requires == importlib.metadata.requires("shoal")
    (command,) = installed.entry_points.select(group="console_scripts", name="shoal")
    assert command.value == "infra.cli.main:main"


def test_the_same_sources_make_the_same_wheel() -> None:
    first = this_wheel()
    this_wheel.cache_clear()
    assert this_wheel().digest == first.digest
    with zipfile.ZipFile(io.BytesIO(first.content)) as archive:
        assert archive.testzip() is None


def test_versions_are_those_that_an_index_has() -> None:
    versions = versions_here()
    assert f"ray=={importlib.metadata.version('ray')}" in versions
    assert not [each for each in versions if "+" in each or each.startswith("shoal")]
