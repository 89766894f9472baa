"""JSON schemas that answers keep to: what every engine takes, and what none does."""

from __future__ import annotations

from serve_apps.engine.protocol import PromptError

_ONE_WAY = {"whitespace_flexible": False}
"""Without it a weak model may write blanks until its tokens are used up."""


def grammar_of(json_schema: str) -> str:
    """The grammar of the answers that keep to a schema, as llguidance writes it.

    Raises:
        PromptError: the schema is none, or asks for what no grammar can keep to.
    """
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json_schema, defaults=_ONE_WAY)  # type: ignore[arg-type]
    except ValueError as error:
        raise PromptError(f"the JSON schema is not valid: {error}", "json_schema") from error
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise PromptError(f"the JSON schema cannot be kept to: {messages[0].splitlines()[0]}", "json_schema")
    return grammar
