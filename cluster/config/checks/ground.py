"""What the checks of jobs and apps stand on: the nodes' room, local paths, and the words for both."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.config.reading.positions import KeyPath, YamlDocument
from cluster.config.reading.sentences import mistake_at, nearest
from cluster.config.sections.cluster import NodeConfig
from cluster.errors import Mistake
from cluster.wording import counted

NODES: KeyPath = ("cluster", "nodes")
STORAGE: KeyPath = ("cluster", "storage")
ANY = "*"
"""Stands for every name in the paths that a check uses."""


@dataclass
class MistakeReport:
    """Collects what the checks find in a section, but for what follows from values wrong in themselves."""

    document: YamlDocument
    broken: Collection[KeyPath]
    """Paths whose values were wrong and were replaced by their defaults."""
    mistakes: list[Mistake]
    top: KeyPath = ()
    """The section that is checked."""

    def inside(self, *top: str) -> MistakeReport:
        """The same collection, for keys of another section."""
        return MistakeReport(self.document, self.broken, self.mistakes, top)

    def __call__(self, key: str, given: Any, message: str, *uses: str | KeyPath) -> None:
        """Note a mistake at `key` of the section.

        `uses` names the other values it follows from: dotted keys of the section, or whole paths.
        """
        path = (*self.top, *_steps(key))
        used = [path, *(use if isinstance(use, tuple) else (*self.top, *use.split(".")) for use in uses)]
        if not any(overlap(wrong, use) for wrong in self.broken for use in used):
            self.mistakes.append(mistake_at(self.document.value_place(path), path, given, message))


def overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one of the paths leads to, or through, the other."""
    return all(a == b or ANY in (a, b) for a, b in zip(one, other, strict=False))


def _steps(key: str) -> KeyPath:
    return tuple(int(step) if step.isdecimal() else step for step in key.split("."))


@dataclass(frozen=True)
class Ground:
    """What jobs and apps stand on: the nodes (none where they are not known), and the directory that their
    paths start from."""

    kinds: tuple[NodeConfig, ...]
    base: Path

    def with_accelerator(self, accelerator: str | None, report: MistakeReport) -> Ground:
        """The nodes that a job or an app may use, all of them for None; reports a kind that none has."""
        if accelerator is None or not self.kinds:
            return self
        kinds = tuple(kind for kind in self.kinds if kind.accelerator == accelerator)
        if kinds:
            return Ground(kinds, self.base)
        known = sorted({kind.accelerator for kind in self.kinds if kind.accelerator is not None})
        if known:
            lowered = {kind.lower(): kind for kind in known}
            guess = nearest(accelerator, lowered)
            hint = f"; did you mean `{lowered[guess]}`?" if guess is not None else ""
            words = ", ".join(f"`{kind}`" for kind in known)
            message = f"should be one of {words} (cluster.nodes), was `{accelerator}`{hint}"
        else:
            message = f"no entry of cluster.nodes has an `accelerator`, was `{accelerator}`"
        report("accelerator", accelerator, message, NODES)
        return self

    def holds(self, cpus: int, gpus: int, *, apart: bool = False) -> int | None:
        """How many units of these resources fit, each wholly on one node; None: as many as one likes, or
        nobody knows.

        Args:
            apart: no two of them on one node.
        """
        if not self.kinds:
            return None
        total = 0
        for kind in self.kinds:
            ways = [have // need for have, need in ((kind.cpus, cpus), (kind.gpus, gpus)) if need]
            if not ways and not apart:
                return None
            total += kind.count * min([*ways, 1] if apart else ways)
        return total

    def describe(self) -> str:
        """The nodes in words: `head (0 CPUs), worker × 2 (2 CPUs)`."""
        shown = [
            f"{kind.name}{f' × {kind.count}' if kind.count > 1 else ''} ({_has(kind)})" for kind in self.kinds
        ]
        return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "")


def resources(cpus: int, gpus: int) -> str:
    """`2 CPUs`, `1 CPU and 1 GPU`, `nothing`."""
    parts = [counted(number, unit) for number, unit in ((cpus, "CPU"), (gpus, "GPU")) if number]
    return " and ".join(parts) or "nothing"


def local_path(storage: str) -> Path | None:
    """The directory of a storage on this machine's file system; None for any other URI."""
    if storage.startswith("file:"):
        return Path(unquote(urlsplit(storage).path))
    return None if "://" in storage else Path(storage)


def path_problem(path: str) -> str | None:
    """Why a local path cannot be read, or None; URIs are not looked at."""
    if "://" in path:
        return None
    try:
        os.stat(path)
    except OSError as error:
        return (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        )
    return None


def _has(kind: NodeConfig) -> str:
    return resources(kind.cpus, kind.gpus) if kind.cpus or kind.gpus else "0 CPUs"
