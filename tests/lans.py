"""Hosts of their own for tests, and Ray on them as people start it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.lab.hosts import lan as lans
from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import REPOSITORY, Lan

needs_hosts = pytest.mark.skipif(lans.missing() is not None, reason=str(lans.missing()))

SHARE = "/data"
"""Where every host finds the one directory that they share."""
RAY_PORT = 6379
INSTALLED = {"PYTHONPATH": str(REPOSITORY)}
"""As if this very Shoal were installed on a host."""


@dataclass
class Workplace:
    """A few hosts with a directory that they share, and what runs there."""

    lan: Lan
    share: Path
    variables: dict[str, str] = field(default_factory=lambda: dict(INSTALLED))
    """What whoever logs in has in the environment, beside what everybody has."""

    @property
    def head(self) -> Host:
        return self.lan.hosts[0]

    def shoal(
        self, *arguments: str | Path, on: Host | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal` on a host, by default the first; the result is not checked."""
        program = [sys.executable, "-m", "infra.cli.main"]
        host = on or self.head
        return host.run(*program, *arguments, environment=self.variables, timeout_s=timeout_s)

    def document(self, *arguments: str | Path, timeout_s: float = 120.0) -> Any:
        """What a command of `shoal` prints with `--json`; it must work."""
        done = self.shoal(*arguments, "--json", timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def python(self, source: str, *arguments: str, on: Host | None = None) -> str:
        """What a program prints on a host; it must work."""
        done = (on or self.head).run(sys.executable, "-c", source, *arguments, environment=self.variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start_ray(self, host: Host, *options: str) -> None:
        """`ray start`, as people type it: the first host is the head."""
        role = ["--head"] if host is self.head else [f"--address={self.head.address}:{RAY_PORT}"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--disable-usage-stats", *options]
        done = host.run(*ray, environment=self.variables)
        assert done.returncode == 0, done.stdout + done.stderr


def with_replicas(lan: Lan, app: str = "chat") -> list[Host]:
    """The hosts on which an app has some."""
    return [host for host in lan.hosts if host.running(f"shoal::Engine:{app}:")]


@contextmanager
def workplace(
    directory: Path, names: Sequence[str], variables: Mapping[str, str] | None = None
) -> Iterator[Workplace]:
    """Hosts of these names."""
    share = directory / "share"
    share.mkdir()
    with Lan(names, directory, shared={SHARE: share}) as lan:
        yield Workplace(lan, share, {**INSTALLED, **(variables or {})})
