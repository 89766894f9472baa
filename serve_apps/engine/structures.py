"""Structures that answers keep to (JSON schemas, expressions, choices, grammars): what every engine takes.

A structure of a few hundred bytes can take the library that compiles it many minutes, whatever its bounds,
and no thread can be stopped. So each is compiled in a process of its own first, which ends when its time is
over.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache

from serve_apps.engine import structure_compiler
from serve_apps.engine.protocol import PromptError, StructureKind
from serve_apps.engine.structure_compiler import NAMES

COMPILERS = 2
"""Structures of one engine that are compiled at the same time; only structures wait for them."""
COMPILE_S = 5.0
"""A structure that is not compiled by then is refused."""
REMEMBERED = 128
"""Structures whose grammars, or mistakes, are remembered..."""
REMEMBERED_CHARACTERS = 64 * 1024
"""...where they are not longer than this."""


@dataclass(frozen=True)
class CompiledStructure:
    """A structure that answers can be kept to."""

    grammar: str
    """As llguidance writes it."""
    text: str
    """As it was given, but for what holds answers to nothing (formats that nobody knows)."""


def compiled(kind: StructureKind, text: str) -> CompiledStructure:
    """What an engine needs to keep an answer to a structure; takes up to COMPILE_S.

    Raises:
        PromptError: it is none, or asks for what no grammar can keep to.
    """
    known = len(text) <= REMEMBERED_CHARACTERS
    said = (_remembered if known else _compiled)(kind, text)
    if "error" in said:
        raise PromptError(said["error"], kind)
    return CompiledStructure(**said)


def is_whole(structure: CompiledStructure, text: str) -> bool:
    """Whether a text is all that a structure asks for."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), structure.grammar, log_level=0)
    data = list(text.encode("utf-8", "surrogatepass"))
    return (not data or matcher.consume_tokens(data)) and matcher.is_accepting()


def _compiled(kind: StructureKind, text: str) -> dict[str, str]:
    """What the compiler says. That it came to no end is raised, since it may be the machine's load: what is
    raised is not remembered."""
    command = [sys.executable, "-P", "-X", "utf8", structure_compiler.__file__]
    asked = json.dumps({"kind": kind, "text": text}).encode()
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=COMPILE_S, check=True)
        said: dict[str, str] = json.loads(done.stdout)
        return said
    except subprocess.TimeoutExpired as error:
        why = f"it was not compiled after {COMPILE_S:g} s"
        raise PromptError(f"the {NAMES[kind]} cannot be kept to: {why}", kind) from error
    except (subprocess.CalledProcessError, ValueError) as error:
        # It takes more memory than it may, or finds a mistake of the library's.
        why = "it is too large to be compiled"
        raise PromptError(f"the {NAMES[kind]} cannot be kept to: {why}", kind) from error


_remembered = lru_cache(REMEMBERED)(_compiled)
