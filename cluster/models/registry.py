"""Models by name, version and alias: `<storage>/models/<name>/<version>/`, complete or absent.

A version is the model's directory (as transformers loads it) with `shoal.json` beside it; the versions of
a name are 1, 2, 3, … and never change once they are there.

How a version is published:

- On a local file system the directory is staged under `models/.staging/` and renamed to the next number.
  `rename(2)` onto a version that is there fails, so of many publishers exactly one gets a number, and the
  others try the next. A publisher holds a lock on its staged directory; what a killed one leaves is
  unlocked, and the next publisher removes it.
- An object store cannot rename, so a publisher first claims a number: it puts a ticket of its own under
  `models/<name>/.claims/<number>/` and lists that directory. If its ticket is alone the number is its
  own; otherwise it leaves the number and claims a later one. Tickets are never deleted, and listings see
  every earlier put, so no two publishers can both find themselves alone. The files follow, `shoal.json`
  last: it is the marker without which a version does not exist. Where publishers meet or are killed,
  a number may stay unused. A model that lies in a storage comes by the publisher's memory, and by no disk.

What moves is the aliases (`model_aliases.py`): `latest` by itself, the others by `promote`.
"""

from __future__ import annotations

import builtins
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.config.sections.section import NAME_PATTERN
from cluster.errors import RequestError
from cluster.files.backend import MissingError, StorageError
from cluster.files.storage import Storage, as_storage
from cluster.models.aliases import LATEST, ModelAliases, check_alias, is_alias
from cluster.node.cache import NodeCache

MODELS = "models"
MARKER = "shoal.json"
"""The file that makes a directory a version; it holds where the model comes from."""
_STAGING = ".staging"
_CLAIMS = ".claims"


@dataclass(frozen=True)
class Version:
    """One published model; `path` is an absolute local path, or a URI on other storages."""

    name: str
    version: int
    path: str
    created_at: str
    """ISO 8601, in UTC."""
    job: str | None = None
    step: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """All of `shoal.json`: job, step, evaluation, config_digest, and what else the publisher said."""
    aliases: tuple[str, ...] = ()
    """What else names it now: `latest` first, then those that were promoted to it."""

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"

    def as_json(self) -> dict[str, Any]:
        """The version as `shoal models --json` lists it."""
        keys = ("name", "version", "path", "job", "step", "created_at")
        return {key: getattr(self, key) for key in keys} | {"aliases": list(self.aliases)}


class Registry:
    """The models in one storage.

    Args:
        storage: where they are; `models/` below it is the registry's.
        cache: local directory for copies of models that are not on a local file system. Default:
            `~/.cache/shoal/models`. What it may take, NodeCache says.
    """

    def __init__(self, storage: Storage, *, cache: Path | None = None) -> None:
        self._storage = storage.child(MODELS)
        self._aliases = ModelAliases(self._storage)
        self._cache = NodeCache(cache or Path.home() / ".cache" / "shoal" / "models")

    def publish(
        self, name: str, directory: Storage | str | os.PathLike[str], facts: Mapping[str, Any]
    ) -> Version:
        """Copy a model directory into the registry as the next version of `name`.

        Args:
            name: lower-case letters, digits, `-`, `_` and `.`.
            directory: the model in the Hugging Face format, here or in a storage; it is left as it is.
            facts: where it comes from, as JSON: job, step, evaluation, config_digest.

        Raises:
            RequestError: the name is not allowed, or the directory is missing or empty.
            StorageError: the storage cannot be written.
        """
        source = as_storage(directory)
        if not re.fullmatch(NAME_PATTERN, name):
            raise RequestError(
                f"{name!r} is no name for a model: lower-case letters, digits, '-', '_' and '.', at most 63,"
                " with a letter or digit at both ends"
            )
        if not source.files():
            raise RequestError(
                f"there is no model to publish as {name}: {source.location} is not a directory with files"
            )
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"job": None, "step": None, "evaluation": None, "config_digest": None, **facts}
        record |= {"name": name, "created_at": created_at}
        if self._storage.local_path() is not None:
            number = self._publish_local(name, source, record)
        else:
            number = self._publish_remote(name, source, record)
        return self._read(name, number, self._look(name)[1])

    def resolve(self, reference: str) -> Version:
        """The version that `NAME`, `NAME@latest`, `NAME@3` or `NAME@ALIAS` names now.

        Raises:
            RequestError: there is no such model, version or alias, or the version that the alias names is
                gone; the message says what there is.
            StorageError: the storage cannot be read, or what is kept of the version or alias is damaged.
        """
        name, mark, wanted = reference.partition("@")
        if mark and not wanted:
            raise RequestError(f"{reference!r} names no version: write {name}@latest or {name}@1")
        if not re.fullmatch(NAME_PATTERN, name):
            raise RequestError(self._no_model(name))
        if is_alias(wanted):
            number = self._aliases.get(name, wanted)
        else:
            number = int(wanted) if re.fullmatch(r"[0-9]{1,18}", wanted) else None
        # Only after the alias: the version that it names was there before it.
        numbers, named = self._look(name)
        if not numbers:
            raise RequestError(self._no_model(name))
        if not mark or wanted == LATEST:
            number = numbers[-1]
        if number in numbers:
            return self._read(name, number, named)
        there_is = f"{name} has the {_span(numbers)} and the {_aliases_listed(named)}"
        if number is not None and is_alias(wanted):
            raise RequestError(
                f"{reference} names version {number}, which is not there any more: {there_is}; `shoal promote"
                f" {name}@{numbers[-1]} {wanted}` lets it name another"
            )
        near = [] if number is not None else difflib.get_close_matches(wanted, named, n=1)
        hint = f" (did you mean {name}@{near[0]}?)" if near else ""
        raise RequestError(f"there is no {reference}{hint}: {there_is}")

    def promote(self, reference: str, alias: str) -> Version:
        """Let `alias` name a version from now on, whatever it named before; the last promotion wins.

        Args:
            reference: `NAME@3`, `NAME@latest`, or `NAME@ALIAS` of another alias.
            alias: a name like the models', not all digits and not `latest`; it need not be there yet.

        Raises:
            RequestError: the alias is not allowed, or there is no such version.
            StorageError: the storage cannot be written.
        """
        check_alias(alias)
        version = self.resolve(reference)
        if "@" not in reference:
            raise RequestError(
                f"{reference!r} names no version: write {reference}@{version.version} or {reference}@latest"
            )
        self._aliases.put(version.name, alias, version.version)
        return self._read(version.name, version.version, self._look(version.name)[1])

    def aliases(self, name: str) -> dict[str, int]:
        """The version that each alias of a model names, whether that is there or not; without `latest`."""
        return self._aliases.all_of(name) if re.fullmatch(NAME_PATTERN, name) else {}

    def list(self) -> builtins.list[Version]:
        """Every version of every model, by name, then by version."""
        return [version for name in self.names() for version in self.versions(name)]

    def names(self) -> builtins.list[str]:
        """The models that have a version."""
        return [
            entry.name
            for entry in self._storage.entries()
            if entry.is_dir and re.fullmatch(NAME_PATTERN, entry.name) and self._numbers(entry.name)
        ]

    def versions(self, name: str) -> builtins.list[Version]:
        """The versions of one model, oldest first; empty when there is no such model."""
        if not re.fullmatch(NAME_PATTERN, name):
            return []
        numbers, named = self._look(name)
        return [self._read(name, number, named) for number in numbers]

    def fetch(self, version: Version) -> Path:
        """A local directory to load the version from; a copy in the cache where the storage is not local."""
        inner = f"{version.name}/{version.version}"
        local = self._storage.local_path(inner)
        if local is not None:
            return local
        place = hashlib.sha256(self._storage.location.encode()).hexdigest()[:16]
        return self._cache.get(f"{place}/{inner}", lambda staged: self._storage.download_dir(inner, staged))

    def _publish_local(self, name: str, source: Storage, record: dict[str, Any]) -> int:
        self._storage.make_dir(_STAGING)
        self._storage.make_dir(name)
        self._clean()
        with self._staged() as staged:
            self._storage.copy_dir(source, staged)
            while True:
                number = max(self._taken(name), default=0) + 1
                self._mark(staged, record | {"version": number})
                if self._storage.claim_dir(staged, f"{name}/{number}"):
                    return number

    def _publish_remote(self, name: str, source: Storage, record: dict[str, Any]) -> int:
        ticket = uuid.uuid4().hex
        number = 0
        while True:
            number = max(number, *self._taken(name), 0) + 1
            claims = f"{name}/{_CLAIMS}/{number}"
            self._storage.write_bytes(f"{claims}/{ticket}", b"")
            tickets = self._storage.list(claims)
            if tickets == [ticket]:
                break
            # Those who met here go on in the order of their tickets, so that they do not meet again.
            number += tickets.index(ticket)
        # A marker that the source holds (a version published again) must not come before the files.
        self._storage.copy_dir(source, f"{name}/{number}", skip=(MARKER,))
        self._mark(f"{name}/{number}", record | {"version": number})
        return number

    def _mark(self, directory: str, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, indent=2, ensure_ascii=False)
        self._storage.write_bytes(f"{directory}/{MARKER}", f"{text}\n".encode())

    @contextmanager
    def _staged(self) -> Iterator[str]:
        """A name to stage a directory under, locked while it is used and gone afterwards."""
        staged = f"{_STAGING}/{uuid.uuid4().hex}"
        path = self._local(staged)
        lock_path = path.with_name(f"{path.name}.lock")
        with _locked(lock_path):
            try:
                yield staged
            finally:
                shutil.rmtree(path, ignore_errors=True)
                lock_path.unlink(missing_ok=True)

    def _clean(self) -> None:
        """Remove what killed publishers left: staged directories whose lock nobody holds."""
        for lock_path in self._local(_STAGING).glob("*.lock"):
            try:
                handle = os.open(lock_path, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # Held by its publisher, or a file system without locks: then leftovers stay (harmless).
                continue
            else:
                shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
                lock_path.unlink(missing_ok=True)
            finally:
                os.close(handle)

    def _local(self, path: str) -> Path:
        local = self._storage.local_path(path)
        assert local is not None
        return local

    def _taken(self, name: str) -> builtins.list[int]:
        """The numbers that a new version cannot have, in no order."""
        return _integers(self._storage.list(name)) + _integers(self._storage.list(f"{name}/{_CLAIMS}"))

    def _numbers(self, name: str) -> builtins.list[int]:
        """The versions that are complete, oldest first."""
        numbers = sorted(_integers(self._storage.list(name)))
        return [number for number in numbers if self._storage.exists(f"{name}/{number}/{MARKER}")]

    def _look(self, name: str) -> tuple[builtins.list[int], dict[str, int]]:
        """The versions that are complete, oldest first, and which of them each alias names."""
        aliases = self._aliases.all_of(name)
        # Only after the aliases: the versions that they name were there before them.
        numbers = self._numbers(name)
        named = {LATEST: numbers[-1]} if numbers else {}
        return numbers, named | {alias: number for alias, number in aliases.items() if number in numbers}

    def _read(self, name: str, number: int, named: Mapping[str, int]) -> Version:
        inner = f"{name}/{number}"
        try:
            facts = json.loads(self._storage.read_bytes(f"{inner}/{MARKER}"))
            created_at = str(facts["created_at"])
        except (ValueError, KeyError, TypeError) as error:
            path = self._storage.child(inner, MARKER).location
            raise StorageError(
                f"{path} is damaged ({error}): remove that version and publish again"
            ) from error
        except MissingError as error:
            raise RequestError(f"{name}@{number} was removed from the registry meanwhile") from error
        return Version(
            name=name,
            version=number,
            path=self._storage.child(inner).location,
            created_at=created_at,
            job=facts.get("job"),
            step=facts.get("step"),
            facts=facts,
            aliases=tuple(alias for alias, at in named.items() if at == number),
        )

    def _no_model(self, name: str) -> str:
        place, names = self._storage.location, self.names()
        if not names:
            return f"there is no model {name!r}: nothing is published in {place} yet"
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        return f"there is no model {name!r} in {place}{hint}; published: {shown}"


def _integers(names: builtins.list[str]) -> builtins.list[int]:
    return [int(name) for name in names if re.fullmatch(r"[1-9][0-9]{0,17}", name)]


def _span(numbers: builtins.list[int]) -> str:
    """`version 1`, `versions 1, 2, 5`, and `versions 1, 2, …, 40` where there are many."""
    shown = [str(number) for number in numbers]
    listed = ", ".join(shown if len(shown) <= 8 else [*shown[:3], "…", *shown[-3:]])
    return f"version{'s' if len(shown) > 1 else ''} {listed}"


def _aliases_listed(named: Mapping[str, int]) -> str:
    """`alias latest`, `aliases latest, production`, and the first of them where there are many."""
    shown = ", ".join([*named][:10]) + (", …" if len(named) > 10 else "")
    return f"alias{'es' if len(named) > 1 else ''} {shown}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file of this name; it ends with the process, however that ends."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks: nobody can tell our leftovers from our work, so nobody cleans.
            break
        # Someone who cleans may have removed the file between our open and our lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)
