"""What `shoal render` prints for Slurm and Kubernetes, from the config alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.version import version

SLURM = "cluster: {name: lab, provider: slurm, storage: /data, slurm: {nodes: 3}}\n"
KUBERNETES = """
cluster:
  name: lab
  provider: kubernetes
  storage: s3://bucket/shoal
  env: {TOKEN: null}
  kubernetes: {image: "shoal:1"}
"""


def render(
    directory: Path, config: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    file = directory / "shoal.yaml"
    file.write_text(config)
    command = [sys.executable, "-m", "infra.cli.main", "render", *arguments, "-f", str(file)]
    home = {"HOME": str(directory), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run(command, env={**home, **variables}, capture_output=True, text=True)


def test_the_batch_script_goes_to_standard_output(tmp_path: Path) -> None:
    done = render(tmp_path, SLURM, "slurm", "--set", "cluster.slurm.partition=gpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/sh\n")
    assert "#SBATCH --nodes=3\n" in done.stdout
    assert "#SBATCH --partition=gpu\n" in done.stdout
    assert not (tmp_path / ".local").exists(), "nothing is written"


def test_the_objects_are_yaml_documents_with_the_callers_variables(tmp_path: Path) -> None:
    done = render(tmp_path, KUBERNETES, "kubernetes", TOKEN="secret")
    assert done.returncode == 0, done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout)]
    assert kinds == [
        "Secret",
        "Secret",
        "Secret",
        "Service",
        "PodDisruptionBudget",
        "PodDisruptionBudget",
        "RayCluster",
    ]
    missing = render(tmp_path, KUBERNETES, "kubernetes")
    assert missing.returncode == 2
    assert "cluster.env: TOKEN should be passed on" in missing.stderr


def test_the_image_is_made_of_this_very_shoal(tmp_path: Path) -> None:
    done = render(tmp_path, KUBERNETES, "container")
    assert done.returncode == 0, done.stderr
    assert f"ARG SHOAL=shoal=={version()}\n" in done.stdout
    assert (
        f"FROM docker.io/library/python:{sys.version_info.major}.{sys.version_info.minor}-slim" in done.stdout
    )


@pytest.mark.parametrize(
    ("config", "what", "words"),
    [
        (SLURM, "kubernetes", "the config has `provider: slurm`, not kubernetes"),
        (SLURM, "nomad", "there is nothing to render as 'nomad'; there is: slurm, kubernetes, container"),
    ],
)
def test_what_cannot_be_rendered_is_said(config: str, what: str, words: str, tmp_path: Path) -> None:
    done = render(tmp_path, config, what)
    assert done.returncode == 2
    assert words in done.stderr
