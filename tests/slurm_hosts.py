"""A site with Slurm, and somebody who has logged in there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.lab.hosts import lan as lans
from infra.lab.hosts import slurm_site
from infra.lab.hosts.lan import FIRST_USER, REPOSITORY, Lan
from infra.lab.hosts.slurm_site import SlurmSite
from tests.ssh_hosts import HEALTH

_MISSING = lans.missing() or slurm_site.missing()
needs_slurm = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
JOB: dict[str, Any] = {
    "task": "causal_lm",
    "model": {
        "architecture": "llama",
        "hidden_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 512,
    },
    "data": {"source": "python-stdlib", "sequence_length": 32},
    "parallel": {"strategy": "ddp"},
    "workers": {"min": 1, "max": 2},
    "batch": {"global": 4, "micro": 2},
    "steps": 1_000_000,
    # Far more than is done between two of them: what is not lost was saved when there was notice.
    "checkpoint": {"every_steps": 100_000},
    "publish": "small",
}
APP = {"chat": {"model": "small@latest", "engine": "torch", "replicas": {"min": 1, "max": 1}}}
"""A job that trains for as long as it may, and an app of the model of a short one."""


@contextmanager
def slurm_site_of(
    directory: Path,
    nodes: int = 3,
    *,
    users: tuple[str, ...] = ("ann",),
    cpus: int | Sequence[int] = 4,
    settings: Mapping[str, str] | None = None,
    partitions: Mapping[str, str] | None = None,
) -> Iterator[SlurmSite]:
    """A login host and nodes, whose homes are one disk."""
    homes = directory / "homes"
    homes.mkdir()
    for place, user in enumerate(users):
        home = homes / user
        home.mkdir(mode=0o755)
        os.chown(home, FIRST_USER + place, FIRST_USER + place)
    names = ["login", *(f"n{number}" for number in range(1, nodes + 1))]
    with (
        Lan(names, directory, shared={"/home": homes}, users=users) as lan,
        SlurmSite(lan, cpus, settings, partitions) as site,
    ):
        yield site


@dataclass
class SlurmUser:
    """Somebody on the login host.

    Attributes:
        homes: where this machine finds everybody's home.
    """

    site: SlurmSite
    homes: Path
    name: str = "ann"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.homes / self.name

    def state(self, cluster: str = "lab") -> Path:
        """What the commands know of a cluster."""
        return self.home / ".local/state/shoal" / cluster

    def write(self, cluster: Mapping[str, Any] | None = None, file: str = "shoal.yaml", **more: Any) -> str:
        """Write the config, of a cluster over two nodes if nothing else is said; its place there."""
        section = {
            "name": "lab",
            "provider": "slurm",
            "storage": f"/home/{self.name}/storage",
            "slurm": {"nodes": 2, "cpus_per_node": 2},
            "env": dict(HEALTH),
            **(cluster or {}),
        }
        text = yaml.safe_dump({"cluster": section, **more})
        self.run("sh", "-c", f"cat > {file}", given=text)
        return f"/home/{self.name}/{file}"

    def run(
        self, *arguments: str, given: str | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; the result is not checked."""
        variables = {"PYTHONPATH": str(REPOSITORY), **self.environment}
        return self.site.login.run(
            *arguments, environment=variables, user=self.name, given=given, timeout_s=timeout_s
        )

    def command(self, *arguments: str, file: str = "shoal.yaml") -> list[str]:
        """What runs a command of `shoal` there."""
        return [sys.executable, "-m", "infra.cli.main", *arguments, "-f", file]

    def shoal(
        self, *arguments: str, file: str = "shoal.yaml", timeout_s: float = 180.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal`; the result is not checked."""
        return self.run(*self.command(*arguments, file=file), timeout_s=timeout_s)

    def document(self, *arguments: str, file: str = "shoal.yaml", timeout_s: float = 180.0) -> Any:
        """What a command prints with `--json`; it must work."""
        done = self.shoal(*arguments, "--json", file=file, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def slurm(self, *arguments: str) -> str:
        """What a command of Slurm's prints; it must work."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout
