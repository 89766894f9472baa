"""The batch job of a cluster, in files of its state directory, which its submitter and its first node see.

slurm.json    which job it is, and of what config
phase.json    how far its first node is
told.jsonl    what the first node has said, for whoever waits
record.json   the cluster's record, while it is up
leave         there when whoever runs it wants its end
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cluster.errors import ShoalError
from cluster.state.record import (
    RECORD_FILE,
    ClusterRecord,
    made_of,
    read_document,
    write_document,
    write_record,
)
from cluster.state.state_directory import require_private, state_directory
from cluster.version import version

_JOB_FILE, _PHASE_FILE = "slurm.json", "phase.json"
_TOLD_FILE, _LEAVE_FILE = "told.jsonl", "leave"
TENANTS = "tenants"
"""The directory of what is kept of jobs and apps until the batch job starts again."""

PhaseName = Literal["waiting", "starting", "up", "leaving", "ended", "failed"]


@dataclass(frozen=True)
class BatchJob:
    """One that was submitted.

    Attributes:
        number: Slurm's; empty until it has one.
        mark: in the environment of all that runs on its nodes.
        section: the config's cluster section as it was submitted.
        version: of the Shoal that submitted it.
    """

    name: str
    mark: str
    config_path: str
    section: Mapping[str, Any]
    number: str = ""
    version: str = field(default_factory=version)

    @property
    def directory(self) -> Path:
        return state_directory(self.name)

    @property
    def words(self) -> str:
        """What people call it."""
        return f"Slurm's job {self.number}"

    def numbered(self, number: str) -> BatchJob:
        """The same with its number."""
        return replace(self, number=number)

    def write(self) -> None:
        """Keep it."""
        require_private(self.directory)
        write_document(self.directory / _JOB_FILE, asdict(self))

    # -- what its first node says -----------------------------------------------------------------------

    def begin(self) -> None:
        """Say that it starts, perhaps again: what was said before is of a time that is over."""
        (self.directory / _TOLD_FILE).unlink(missing_ok=True)
        self.withdraw()
        self.enter("starting")

    def enter(self, phase: PhaseName, said: str = "", **facts: Any) -> None:
        """Say how far it is."""
        document = {"number": self.number, "phase": phase, "said": said, "facts": facts}
        write_document(self.directory / _PHASE_FILE, document)

    def phase(self) -> Phase:
        """How far it is."""
        os.listdir(self.directory)  # over NFS it is this that looks whether there is something new
        found = read_document(self.directory / _PHASE_FILE)
        if found is None or found["number"] != self.number:
            return Phase("waiting")
        return Phase(found["phase"], found["said"], found["facts"])

    def tell(self, text: str) -> None:
        """Say something to whoever waits."""
        with (self.directory / _TOLD_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"number": self.number, "text": text}) + "\n")

    def told(self) -> list[str]:
        """All that it has said."""
        try:
            lines = (self.directory / _TOLD_FILE).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        said = [json.loads(line) for line in lines if line.endswith("}")]
        return [each["text"] for each in said if each["number"] == self.number]

    def publish(self, record: ClusterRecord) -> None:
        """Say that the cluster is up."""
        write_record(record)

    def withdraw(self) -> None:
        """Say that it is not."""
        (self.directory / RECORD_FILE).unlink(missing_ok=True)

    def log_tail(self, lines: int = 15) -> str:
        """The last of what Slurm keeps of its output."""
        try:
            path = self.directory / f"slurm-{self.number}.log"
            said = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            said = []
        return "\n".join(f"  {line}" for line in said[-lines:]) or "  (nothing)"

    # -- its end ----------------------------------------------------------------------------------------

    def want_end(self) -> None:
        """Say that it is to end and not to come back."""
        (self.directory / _LEAVE_FILE).touch()

    @property
    def end_is_wanted(self) -> bool:
        return (self.directory / _LEAVE_FILE).exists()


@dataclass(frozen=True)
class Phase:
    """How far a batch job is; it `waits` in the queue."""

    name: PhaseName
    said: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_batch_job(name: str) -> BatchJob | None:
    """That of a cluster, where one was submitted and the cluster was not taken down."""
    path = state_directory(name) / _JOB_FILE
    found = read_document(path)
    return None if found is None else made_of(BatchJob, found, path)


def require_batch_job(name: str) -> BatchJob:
    """The same.

    Raises:
        ShoalError: there is none.
    """
    job = read_batch_job(name)
    if job is None:
        raise ShoalError(f"cluster {name} was not brought up from here through Slurm (`provider: slurm`)")
    return job
