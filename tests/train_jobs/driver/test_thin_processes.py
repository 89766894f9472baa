"""What a job's processes beside its ranks import: each second of it is one more until the first step."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "ray.serve")


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("train_jobs.driver.driver", (*HEAVY, "pandas", "ray.train", "ray.data")),
        ("train_jobs.records.control", (*HEAVY, "pandas", "ray.train", "ray.data")),
        ("train_jobs.group.job_agents", (*HEAVY, "pandas", "ray.train", "ray.data")),
        ("train_jobs.group.worker", HEAVY),  # Ray Train takes the rest with it
        ("train_jobs.group.trainer", HEAVY),
    ],
)
def test_nobody_imports_what_ranks_alone_need(module: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted({set(unwanted)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
