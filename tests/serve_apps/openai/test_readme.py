"""The page of the API is true: each field that a request may have, what becomes of it, and its test."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat_completion

from serve_apps.anthropic.schema import MessagesRequest
from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.errors import ApiError
from serve_apps.openai.parse import parse
from serve_apps.openai.responses_schema import ResponsesRequest
from serve_apps.openai.schema import CompletionRequest, Request
from serve_apps.openai.text_schema import (
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "serve_apps/openai/README.md"
NEEDED: dict[type[Request], dict[str, Any]] = {
    CompletionRequest: {"model": "chat", "prompt": "a"},
    ChatRequest: {"model": "chat", "messages": [{"role": "user", "content": "a"}]},
}
KINDS = tuple(NEEDED)


def table(head: str) -> list[list[str]]:
    """The cells of the table that begins like this, without its head."""
    lines = PAGE.read_text().partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> set[str]:
    """What a cell names as code."""
    return set(re.findall(r"`([^`]+)`", cell))


def rows() -> dict[str, list[str]]:
    """The cells of the table of fields, by field."""
    return {name: rest for fields, *rest in table("| field |") for name in names(fields)}


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
    assert known <= set(rows())
    assert all(rows()[name][:2] == ["refused", "refused"] for name in set(rows()) - known)


def test_no_field_of_openais_client_lacks_its_row() -> None:
    for kind in (chat_completion.CompletionCreateParamsBase, completion.CompletionCreateParamsBase):
        assert set(kind.__annotations__) <= set(rows())


def test_no_field_of_vllm_lacks_its_row() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    chats = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
    completions = importlib.import_module("vllm.entrypoints.openai.completion.protocol").CompletionRequest
    for kind in (chats, completions):
        assert set(kind.model_fields) <= set(rows())


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


OTHERS: dict[str, type[Any]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/pooling": PoolingRequest,
    "/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def test_the_other_endpoints_take_what_their_rows_say() -> None:
    before: list[set[str]] = []
    said = table("| endpoint |")
    assert [names(row[0]) for row in said] == [{path} for path in OTHERS]
    for (_, *cells, test), (path, kind) in zip(said, OTHERS.items(), strict=True):
        found = [names(cell) | (before[i] if "the same" in cell else set()) for i, cell in enumerate(cells)]
        before = found
        assert found == [set(kind.model_fields), set(getattr(kind, "NEUTRAL", ())), set(kind.IGNORED)], path
        assert path.removeprefix("/v1") in (ROOT / "tests/serve_apps" / test.strip("`")).read_text()


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/responses", ResponsesRequest), ("/v1/messages", MessagesRequest)]
)
def test_the_newer_endpoints_take_what_their_rows_say(path: str, kind: type[Any]) -> None:
    said = dict(table(f"| `{path}` |"))
    taken, nothing, refused = (names(said[row]) for row in ("taken", "changes nothing", "refused"))
    assert set(kind.model_fields) <= taken | nothing
    assert set(kind.IGNORED) <= nothing
    assert set(kind.NEUTRAL) <= refused
