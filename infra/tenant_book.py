"""What is kept of the jobs and apps of a cluster whose nodes go and come back: enough to go on with them.

    DIRECTORY/jobs/JOB/package/           what travelled with a job
                       environment.json   the variables that it passes on
    DIRECTORY/apps.json                   the apps, as they are served
              left.json                   the jobs that were stopped since the nodes had to go

The directory outlives the nodes; it is the user's own, since variables may be secret.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.hosts.settings import TENANTS_VARIABLE
from cluster.state.state_directory import require_private, write_private
from train_jobs.driver.package import Package

_JOBS, _PACKAGE = "jobs", "package"
_ENVIRONMENT, _APPS, _LEFT = "environment.json", "apps.json", "left.json"


@dataclass(frozen=True)
class KeptJob:
    """What is needed to go on with a job."""

    package: Package
    environment: dict[str, str]


class TenantBook:
    """The directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def of_this_cluster(cls) -> TenantBook | None:
        """That of the cluster that this process runs on; None where its nodes stay."""
        place = os.environ.get(TENANTS_VARIABLE)
        return None if place is None else cls(Path(place))

    # -- jobs -------------------------------------------------------------------------------------------

    def keep_job(self, job: str, package: Package, environment: Mapping[str, str]) -> None:
        """Keep what came with a job that was submitted, or gone on with."""
        for directory in (self._directory, self._directory / _JOBS):
            require_private(directory)
        place, half = self._job(job), self._job(f".{job}")
        shutil.rmtree(half, ignore_errors=True)
        require_private(half)
        (half / _PACKAGE).mkdir()
        package.copy(half / _PACKAGE)
        write_private(half / _ENVIRONMENT, json.dumps(dict(environment)))
        shutil.rmtree(place, ignore_errors=True)
        half.rename(place)

    def jobs(self) -> list[str]:
        """The jobs that something is kept of."""
        try:
            return sorted(name for name in os.listdir(self._directory / _JOBS) if name[0] != ".")
        except FileNotFoundError:
            return []

    def job(self, job: str) -> KeptJob:
        """What is kept of one."""
        base = self._job(job) / _PACKAGE
        files = sorted(path for path in base.rglob("*") if path.is_file())
        names = tuple(path.relative_to(base).as_posix() for path in files)
        package = Package(base, names, sum(path.stat().st_size for path in files))
        environment = json.loads((self._job(job) / _ENVIRONMENT).read_text(encoding="utf-8"))
        return KeptJob(package, environment)

    def forget_job(self, job: str) -> None:
        """Of one that has ended."""
        shutil.rmtree(self._job(job), ignore_errors=True)

    def _job(self, job: str) -> Path:
        return self._directory / _JOBS / job

    # -- apps -------------------------------------------------------------------------------------------

    def keep_apps(self, specs: Sequence[Mapping[str, Any]]) -> None:
        """Keep the specs of all apps that are served; nothing happens while they leave."""
        if not self.is_closed and specs != self.apps():
            require_private(self._directory)
            write_private(self._directory / _APPS, json.dumps(list(specs)))

    def apps(self) -> list[dict[str, Any]]:
        """The specs of the apps."""
        found: list[dict[str, Any]] = self._read(_APPS) or []
        return found

    # -- leaving and coming back ------------------------------------------------------------------------

    def close(self, jobs: Collection[str]) -> None:
        """From now on what ends does so since the nodes go.

        Args:
            jobs: those that run.
        """
        require_private(self._directory)
        write_private(self._directory / _LEFT, json.dumps(sorted(jobs)))

    @property
    def is_closed(self) -> bool:
        return (self._directory / _LEFT).exists()

    def left(self) -> list[str]:
        """The jobs that were stopped since the nodes had to go; none where they were lost."""
        found: list[str] = self._read(_LEFT) or []
        return found

    def open(self) -> None:
        """What ends does so by itself again."""
        (self._directory / _LEFT).unlink(missing_ok=True)

    def forget(self) -> None:
        """Keep nothing, and nothing more: the cluster ends."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.close(())

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self._directory / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
