"""JSON schemas that answers keep to: what every engine takes, and what none does.

A schema of a few hundred bytes can take the library that compiles it many minutes, whatever its bounds, and
no thread can be stopped. So each is compiled in a process of its own first, which ends when its time is over.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache

from serve_apps.engine import schema_compiler
from serve_apps.engine.protocol import PromptError

COMPILERS = 2
"""Schemas of one engine that are compiled at the same time; others wait, and nothing but schemas does."""
COMPILE_S = 5.0
"""A schema that is not compiled by then is refused."""
REMEMBERED = 128
"""Schemas whose grammars, or mistakes, are remembered..."""
REMEMBERED_CHARACTERS = 64 * 1024
"""...where they are not longer than this."""


@dataclass(frozen=True)
class CompiledSchema:
    """A JSON schema that answers can be kept to."""

    grammar: str
    """As llguidance writes it."""
    schema: str
    """As it was given, but for what holds answers to nothing (formats that nobody knows)."""


def compiled(json_schema: str) -> CompiledSchema:
    """What an engine needs to keep an answer to a schema; takes up to COMPILE_S.

    Raises:
        PromptError: the schema is none, or asks for what no grammar can keep to.
    """
    known = len(json_schema) <= REMEMBERED_CHARACTERS
    said = (_remembered if known else _compiled)(json_schema)
    if "error" in said:
        raise PromptError(said["error"], "json_schema")
    return CompiledSchema(**said)


def _compiled(json_schema: str) -> dict[str, str]:
    """What the compiler says. That it came to no end is raised, since it may be the machine's load: what is
    raised is not remembered."""
    command = [sys.executable, "-P", "-X", "utf8", schema_compiler.__file__]
    try:
        done = subprocess.run(
            command, input=json_schema.encode(), capture_output=True, timeout=COMPILE_S, check=True
        )
        said: dict[str, str] = json.loads(done.stdout)
        return said
    except subprocess.TimeoutExpired as error:
        why = f"it was not compiled after {COMPILE_S:g} s"
        raise PromptError(f"the JSON schema cannot be kept to: {why}", "json_schema") from error
    except (subprocess.CalledProcessError, ValueError) as error:
        # It takes more memory than it may, or finds a mistake of the library's.
        why = "it is too large to be compiled"
        raise PromptError(f"the JSON schema cannot be kept to: {why}", "json_schema") from error


_remembered = lru_cache(REMEMBERED)(_compiled)
