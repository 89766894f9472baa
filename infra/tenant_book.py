"""What is kept of the jobs and apps of a cluster whose nodes go and come back: enough to go on with them.

    PLACE/jobs/JOB.json               the variables that a job passes on, and which package is its
          packages/JOB/DIGEST.tar.gz  what travelled with it
          apps.json                   the apps, as they are served
          left.json                   the jobs that were stopped since the nodes had to go

The place, a path or a URI as the storage has them, outlives the nodes. A directory is for the user alone,
since variables may be secret; who reads an object store, its owner says.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.files.storage import MissingError, Storage
from cluster.hosts.settings import TENANTS_VARIABLE
from cluster.state.state_directory import require_private
from train_jobs.driver.package import Package
from train_jobs.driver.packing import pack, unpacked

_JOBS, _PACKAGES, _APPS, _LEFT = "jobs", "packages", "apps.json", "left.json"


@dataclass(frozen=True)
class KeptJob:
    """What is needed to go on with a job."""

    package: Package
    environment: dict[str, str]


class TenantBook:
    """The place.

    Raises:
        ShoalError: it cannot be read, or written; from every method.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._files = Storage(location)

    @classmethod
    def of_this_cluster(cls) -> TenantBook | None:
        """That of the cluster that this process runs on; None where its nodes stay."""
        place = os.environ.get(TENANTS_VARIABLE)
        return None if place is None else cls(place)

    # -- jobs -------------------------------------------------------------------------------------------

    def keep_job(self, job: str, package: Package, environment: Mapping[str, str]) -> None:
        """Keep what came with a job that was submitted, or gone on with."""
        packed = io.BytesIO()  # a package is bounded; the head's disk may be full
        name = f"{pack(package, packed)}.tar.gz"
        self._write(f"{_PACKAGES}/{job}/{name}", packed.getvalue())
        # What names the package comes after it: whoever is killed between the two has changed nothing.
        kept = {"package": name, "environment": dict(environment)}
        self._write(f"{_JOBS}/{job}.json", json.dumps(kept).encode())
        for other in self._files.list(f"{_PACKAGES}/{job}"):
            if other != name:
                self._files.delete(f"{_PACKAGES}/{job}/{other}")

    def jobs(self) -> list[str]:
        """The jobs that something is kept of."""
        return [name.removesuffix(".json") for name in self._files.list(_JOBS) if name.endswith(".json")]

    @contextmanager
    def job(self, job: str) -> Iterator[KeptJob]:
        """What is kept of one; its files go at the end."""
        kept = json.loads(self._files.read_bytes(f"{_JOBS}/{job}.json"))
        with (
            self._files.reader(f"{_PACKAGES}/{job}/{kept['package']}") as file,
            unpacked(file) as package,
        ):
            yield KeptJob(package, kept["environment"])

    def forget_job(self, job: str) -> None:
        """Of one that has ended."""
        self._files.delete(f"{_JOBS}/{job}.json")
        self._files.delete_dir(f"{_PACKAGES}/{job}")

    # -- apps -------------------------------------------------------------------------------------------

    def keep_apps(self, specs: Sequence[Mapping[str, Any]]) -> None:
        """Keep the specs of all apps that are served; nothing happens while they leave."""
        if specs != self.apps() and not self.is_closed:
            self._write(_APPS, json.dumps(list(specs)).encode())

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
        self._write(_LEFT, json.dumps(sorted(jobs)).encode())

    @property
    def is_closed(self) -> bool:
        return self._files.exists(_LEFT)

    def left(self) -> list[str]:
        """The jobs that were stopped since the nodes had to go; none where they were lost."""
        found: list[str] = self._read(_LEFT) or []
        return found

    def open(self) -> None:
        """What ends does so by itself again."""
        self._files.delete(_LEFT)

    def forget(self) -> None:
        """Keep nothing, and nothing more: the cluster ends."""
        self.close(())
        self._files.delete(_APPS)
        for directory in (_JOBS, _PACKAGES):
            self._files.delete_dir(directory)

    # -- files ------------------------------------------------------------------------------------------

    def _write(self, name: str, data: bytes) -> None:
        place, file = self._files.local_path(), self._files.local_path(name)
        if place is not None and file is not None:
            for above in reversed(file.parents):
                if above.is_relative_to(place):
                    require_private(above)
        self._files.write_bytes(name, data)
        if file is not None:
            file.chmod(0o600)

    def _read(self, name: str) -> Any:
        try:
            return json.loads(self._files.read_bytes(name))
        except MissingError:
            return None
