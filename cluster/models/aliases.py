"""Aliases of models: names that people move from version to version, `models/<name>/.aliases/<alias>.json`.

An alias is one small file, `{"version": 3, "promoted_at": "…"}`, that is only ever replaced as a whole
(`Storage.write_bytes`): of promotions at the same time the last one wins, a reader sees the old or the new
one, and a killed promotion happened or did not.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

from cluster.config.sections.section import NAME_PATTERN
from cluster.errors import RequestError
from cluster.files.backend import MissingError, StorageError
from cluster.files.storage import Storage

LATEST = "latest"
"""Always the newest version; it is not kept anywhere and cannot be moved."""
_DIRECTORY = ".aliases"
_ENDING = ".json"


class DamagedAliasError(StorageError):
    """The file of an alias does not say which version it names."""


def is_alias(word: str) -> bool:
    """Whether a version can be promoted to this name: neither a version's number nor `latest`."""
    return bool(re.fullmatch(NAME_PATTERN, word)) and not word.isdigit() and word != LATEST


def check_alias(word: str) -> None:
    """See that `is_alias`.

    Raises:
        RequestError: it is not; the message says why.
    """
    if is_alias(word):
        return
    if word == LATEST:
        raise RequestError(f"{LATEST} always names the newest version and cannot be promoted to")
    if word.isascii() and word.isdigit():
        raise RequestError(
            f"{word!r} is no name for an alias: digits alone are a version; put a letter in it"
        )
    raise RequestError(
        f"{word!r} is no name for an alias: lower-case letters, digits, '-', '_' and '.', at most 63,"
        " with a letter or digit at both ends"
    )


class ModelAliases:
    """The aliases of the models in a registry.

    Args:
        models: where the models are, each in the directory of its name; all names are checked by the caller.
    """

    def __init__(self, models: Storage) -> None:
        self._models = models

    def get(self, name: str, alias: str) -> int | None:
        """The version that an alias names, whether that is there or not; None when there is no such alias.

        Raises:
            DamagedAliasError: somebody else has written to its file.
        """
        path = f"{name}/{_DIRECTORY}/{alias}{_ENDING}"
        try:
            record = json.loads(self._models.read_bytes(path))
            number = record["version"]
            if type(number) is not int or number < 1:
                raise ValueError(f"version is {number!r}")
        except MissingError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedAliasError(
                f"{self._models.child(path).location} is damaged ({error}): promote to {alias} again"
            ) from error
        return number

    def all_of(self, name: str) -> dict[str, int]:
        """What each alias of a model names, by the alias; one that is damaged names nothing.

        That one is an error only for who asks for it: the model's other versions are in order.
        """
        found = {}
        for file in self._models.list(f"{name}/{_DIRECTORY}"):
            alias = file.removesuffix(_ENDING)
            if file == alias or not is_alias(alias):
                continue
            try:
                number = self.get(name, alias)
            except DamagedAliasError:
                continue
            if number is not None:
                found[alias] = number
        return dict(sorted(found.items()))

    def put(self, name: str, alias: str, version: int) -> None:
        """Let an alias name this version from now on, whatever it named before."""
        record = {"version": version, "promoted_at": datetime.now(UTC).isoformat(timespec="seconds")}
        self._models.write_bytes(f"{name}/{_DIRECTORY}/{alias}{_ENDING}", f"{json.dumps(record)}\n".encode())
