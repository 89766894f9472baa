"""Token streams that another job of the same storage has made of the same: copied, and not made again.

What was made is noted under a digest of all that it follows from: the job's data as its config has it, the
tokenizer, the files of the corpus with their sizes and times, and the versions of the libraries. It is noted
twice: as the config names the tokenizer, which is known before there is one, and by what the tokenizer is,
wherever it lies, so that who goes on with a published model has the tokens of the job that has trained it.
The note says where it lies, which is that job's own directory: where that is gone, or has become something
else, it is made again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from cluster.files.backend import MissingError, StorageError
from cluster.files.storage import Storage
from train_jobs.data.documents import PYTHON_STDLIB
from train_jobs.data.identity import digest
from train_jobs.data.token_streams import FACTS, STAGED, read_facts

_FORMAT = 1
"""Another number where the same documents become other tokens than before."""
_LIBRARIES = ("numpy", "pyarrow", "tokenizers", "transformers")
SETTLED_S = 10.0
"""A file that has changed since may change again within one tick of its clock, and nobody would see it."""


def key_of(config: TrainJobConfig, origin: Mapping[str, Any], now: float | None = None) -> str | None:
    """What streams are known by; None: their files have changed a moment ago.

    Args:
        origin: what they follow from, as `StreamWriter` has it.
    """
    files: list[Any] = []
    for source in (config.data.source, config.data.held_out_source):
        if source is None or source == PYTHON_STDLIB:
            files.append([sys.version, sys.prefix])
        else:
            from cluster.files.parquet import ParquetFiles  # takes pandas with it: half a second

            files.append(ParquetFiles(source, []).stamps())
    newest = max((stamp[2] for each in files for stamp in each if isinstance(stamp, list)), default=0)
    if newest / 1e9 > (time.time() if now is None else now) - SETTLED_S:
        return None
    versions = {library: version(library) for library in _LIBRARIES}
    return digest([_FORMAT, dict(origin), files, versions])


def copy_made_before(notes: Storage, key: str, place: Storage, made_of: Mapping[str, Any]) -> bool:
    """Fill an empty directory with what was made of the same; whether that could be. What is there of it
    otherwise vouches for nothing, and is replaced by what is made.

    Args:
        notes: where jobs have noted what they have made.
        made_of: what the config says that the streams follow from; they count as made of that.
    """
    try:
        note = json.loads(notes.read_bytes(f"{key}.json"))
        other = Storage(note["place"])
        known = read_facts(other)
        if known is None or known != note["facts"]:
            return False
        last = [name for name in other.files() if name == FACTS or name.startswith(STAGED)]
        place.copy_dir(other, skip=last)
        if read_facts(other) != known:  # it has become something else meanwhile
            return False
        place.write_bytes(FACTS, json.dumps({**known, "made_of": dict(made_of)}).encode())
    except (MissingError, StorageError, ValueError, KeyError, TypeError):
        return False
    return True


def note_made(notes: Storage, key: str, place: Storage) -> None:
    """Note where streams lie that were made."""
    note = {"place": place.location, "facts": read_facts(place)}
    notes.write_bytes(f"{key}.json", json.dumps(note).encode())
