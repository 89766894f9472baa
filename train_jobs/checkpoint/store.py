"""The checkpoints of a run: complete or not there, listed, held, and cleared away."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.files.storage import Storage
from train_jobs.checkpoint.manifest import (
    COMMIT_MARKER,
    BrokenManifestError,
    Manifest,
    read_manifest,
    write_manifest,
)
from train_jobs.checkpoint.retention import Retention

REJECTED = "rejected.json"
"""In a checkpoint that was found damaged: why."""
HELD = "held"
"""Beside the checkpoints: one file for everybody who is reading one."""
_HOLD_S = 3600.0
"""After this time a reader is taken for dead."""

_NAME = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as it lies in the storage.

    Attributes:
        manifest: None where it was never completed, or where `damage` is its own.
        damage: what is wrong with one that was completed; it is not loaded.
        rejected: whether that was found, and told, at an earlier start.
    """

    step: int
    manifest: Manifest | None
    damage: str | None = None
    rejected: bool = False

    @property
    def complete(self) -> bool:
        return self.manifest is not None and self.damage is None

    @property
    def unfinished(self) -> bool:
        """Whether it was never completed."""
        return self.manifest is None and self.damage is None

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The means of the held-out data at its step, where they are known."""
        return self.manifest.facts.get("evaluation") if self.manifest else None

    def metric(self, name: str) -> float | None:
        value = (self.evaluation or {}).get(name)
        return float(value) if value is not None else None


class CheckpointStore:
    """The directory `checkpoints/` of one run; one rank writes here, and calls what deletes."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def location(self, step: int) -> str:
        """The path or URI of a checkpoint."""
        return self.storage.child(checkpoint_name(step)).location

    def all(self) -> list[Checkpoint]:
        """Every checkpoint that is there in part or whole, oldest first."""
        found = (_NAME.fullmatch(entry.name) for entry in self.storage.entries() if entry.is_dir)
        return [self.look(int(match.group(1))) for match in found if match]

    def look(self, step: int) -> Checkpoint:
        """What can be told without reading the files themselves."""
        name = checkpoint_name(step)
        try:
            manifest = read_manifest(self.storage, name)
        except BrokenManifestError:
            rejected = self.storage.exists(f"{name}/{REJECTED}")
            return Checkpoint(step, None, f"{COMMIT_MARKER} is not what was written", rejected)
        if manifest is None:
            return Checkpoint(step, None)
        if self.storage.exists(f"{name}/{REJECTED}"):
            reason = json.loads(self.storage.read_bytes(f"{name}/{REJECTED}"))["reason"]
            return Checkpoint(step, manifest, reason, rejected=True)
        for file, fact in manifest.files.items():
            size = self.storage.size_bytes(f"{name}/{file}")
            if size is None:
                return Checkpoint(step, manifest, f"{file} is missing")
            if size != fact.size_bytes:
                return Checkpoint(step, manifest, f"{file} has {size} bytes; {fact.size_bytes} were written")
        return Checkpoint(step, manifest)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in self.all() if checkpoint.complete]

    def newest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def ranked(self, retention: Retention, metric: str) -> list[int]:
        """Steps of complete checkpoints that have a metric, the best first."""
        return retention.ranked({each.step: each.metric(metric) for each in self.all() if each.complete})

    def prepare(self, step: int) -> None:
        """Make room for a checkpoint that is about to be written; one rank calls this, before any writes."""
        self.delete(step)
        self.storage.make_dir(checkpoint_name(step))

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        """Add to what is known of a complete checkpoint; of another one there is nothing to note."""
        if (manifest := self.look(step).manifest) is not None:
            noted = Manifest(manifest.files, {**manifest.facts, **facts})
            write_manifest(self.storage, checkpoint_name(step), noted)

    def reject(self, step: int, reason: str) -> None:
        """Never load this one again."""
        self.storage.write_bytes(
            f"{checkpoint_name(step)}/{REJECTED}", json.dumps({"reason": reason}).encode()
        )

    def retain(self, retention: Retention, metric: str) -> list[int]:
        """Delete what needs not stay; returns the steps. What somebody is reading stays for now."""
        found = self.all()
        complete = {each.step: each.metric(metric) for each in found if each.complete}
        leaving = complete.keys() - retention.stay(complete) - self._held()
        # Damaged ones can be looked at until as many good ones are there after them.
        oldest = min(sorted(complete)[-retention.newest :], default=0)
        leaving |= {each.step for each in found if each.damage is not None and each.step < oldest}
        for step in sorted(leaving):
            self.delete(step)
        return sorted(leaving)

    def drop_unfinished(self) -> list[int]:
        """Delete what was left half-written by ranks that died; returns the steps."""
        left = [each.step for each in self.all() if each.unfinished]
        for step in left:
            self.delete(step)
        return left

    def drop_half(self, step: int) -> None:
        """Delete what was written of a save that failed; one that failed after its commit stays."""
        if self.look(step).unfinished:
            self.delete(step)

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Keep a checkpoint from being deleted while it is read."""
        mark = f"{HELD}/{checkpoint_name(step)}.{uuid.uuid4().hex}"
        self.storage.write_bytes(mark, json.dumps({"time": time.time()}).encode())
        try:
            yield
        finally:
            self.storage.delete(mark)

    def delete(self, step: int) -> None:
        name = checkpoint_name(step)
        # The marker goes first: a deletion that is cut off must not leave what looks like a whole checkpoint.
        self.storage.delete(f"{name}/{COMMIT_MARKER}")
        self.storage.delete_dir(name)

    def _held(self) -> set[int]:
        held = set()
        for name in self.storage.list(HELD):
            match = _NAME.match(name)
            facts: dict[str, Any] = json.loads(self.storage.read_bytes(f"{HELD}/{name}"))
            if match and time.time() - facts["time"] < _HOLD_S:
                held.add(int(match.group(1)))
        return held
