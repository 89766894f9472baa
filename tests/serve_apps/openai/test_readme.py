"""The page of the API is true: each field that a request may have, what becomes of it, and its test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.errors import ApiError
from serve_apps.openai.parse import parse
from serve_apps.openai.schema import CompletionRequest, Request

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "serve_apps/openai/README.md"
NEEDED: dict[type[Request], dict[str, Any]] = {
    CompletionRequest: {"model": "chat", "prompt": "a"},
    ChatRequest: {"model": "chat", "messages": [{"role": "user", "content": "a"}]},
}
KINDS = tuple(NEEDED)


def rows() -> dict[str, list[str]]:
    """The cells of the table of fields, by field."""
    table = PAGE.read_text().partition("| field |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name.strip("`"): rest for name, *rest in cells}


def asked(kind: type[Request], name: str, value: object) -> Request:
    return parse(kind, {**NEEDED[kind], name: value})


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
    said = dict(zip(KINDS, rows()[name], strict=False))
    for kind, words in said.items():
        assert words == becomes(kind, name)
        if words == "refused":
            with pytest.raises(ApiError, match=name):
                asked(kind, name, 1)
        elif words == "changes nothing":
            assert asked(kind, name, {"any": "thing"}) == parse(kind, NEEDED[kind])
        elif words.startswith("only"):
            for value in kind.NEUTRAL[name]:
                assert asked(kind, name, value) == parse(kind, NEEDED[kind])
            with pytest.raises(ApiError, match=f"'{name}' is not supported"):
                asked(kind, name, {"any": "thing"})


@pytest.mark.parametrize("name", sorted(rows()))
def test_the_test_of_a_row_is_about_its_field(name: str) -> None:
    test = ROOT / "tests/serve_apps" / rows()[name][-1].strip("`")
    # What is not taken is tried here, by the row itself.
    assert test == Path(__file__) or name in test.read_text()
