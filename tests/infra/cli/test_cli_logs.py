"""`shoal logs` where there is nothing to show: what was asked for, and what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters import shoal, unique_name, write_config


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("chat",), ("neither an app nor a job 'chat'", "is not up", "no jobs yet")),
        (("chat", "--app"), ("no app 'chat'", "is not up")),
        (("chat", "--request", "r-1"), ("no app 'chat'", "is not up")),
        (("chat", "--job"), ("no job 'chat'", "no jobs yet")),
        (("chat", "--app", "--job"), ("exclude each other",)),
        (("chat", "--tail", "-1"), ("--tail",)),
    ],
)
def test_without_a_cluster_it_says_so(
    arguments: tuple[str, ...], says: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_config(tmp_path, unique_name(), "storage: ./storage")
    done = shoal("logs", *arguments, "-f", str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert all(words in done.stderr for words in says), done.stderr
    assert "Traceback" not in done.stderr
