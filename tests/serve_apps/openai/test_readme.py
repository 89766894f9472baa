"""The page of the API is true: each field that a request may have, what becomes of it, and its test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.schema import CompletionRequest, Request

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "serve_apps/openai/README.md"
KINDS: tuple[type[Request], ...] = (CompletionRequest, ChatRequest)


def rows() -> dict[str, list[str]]:
    """The cells of the table of fields, by field."""
    table = PAGE.read_text().partition("| field |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name.strip("`"): rest for name, *rest in cells}


def becomes(kind: type[Request], name: str) -> str:
    if name in kind.IGNORED:
        return "changes nothing"
    if name in kind.NEUTRAL:
        return "only " + " or ".join(f"`{json.dumps(value)}`" for value in kind.NEUTRAL[name])
    return "taken" if name in kind.model_fields and name not in kind.REPLACED else "refused"


def test_every_field_has_its_row() -> None:
    known = {
        name for kind in KINDS for name in (*kind.model_fields, *kind.NEUTRAL, *kind.IGNORED, *kind.REPLACED)
    }
    assert set(rows()) == known


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_field_is_taken_or_refused_as_its_row_says(name: str) -> None:
    completions, chat, _, tested = rows()[name]
    assert (completions, chat) == (becomes(CompletionRequest, name), becomes(ChatRequest, name))
    test = ROOT / "tests/serve_apps" / tested.strip("`")
    assert test.is_file()
