"""A process of its own that compiles one JSON schema: its standard input to a grammar, or to what is wrong.

It imports nothing of ours, and is started by its file's name: see `json_schema`.
"""

from __future__ import annotations

import json
import resource
import sys

MEMORY_BYTES = 4 * 1024**3
"""Of addresses, most of which are never used."""
_ONE_WAY = {"whitespace_flexible": False}
"""Without it a weak model may write blanks until its tokens are used up."""


def compile_schema(json_schema: str) -> dict[str, str]:
    """`grammar`, as llguidance writes it, or `error`."""
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json_schema, defaults=_ONE_WAY)  # type: ignore[arg-type]
    except ValueError as error:
        return {"error": f"the JSON schema is not valid: {error}"}
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        return {"error": f"the JSON schema cannot be kept to: {messages[0].splitlines()[0]}"}
    return {"grammar": grammar}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(compile_schema(sys.stdin.read()), sys.stdout)
