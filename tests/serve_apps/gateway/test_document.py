"""The OpenAPI document is true: schemathesis sends what it allows and what it forbids, to the real server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_apps.gateway.access import Access
from serve_apps.gateway.api import build_api
from serve_apps.gateway.app_table import AppTable
from serve_apps.gateway.service import GatewayService
from serve_apps.http.deadline import HEADER
from tests.fuzzing import fuzz
from tests.serve_apps.gateway_process import RunningGateway, running_gateway
from tests.serve_apps.stub_gateway import StubBackend

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
]
"""All of schemathesis but these.

positive_data_acceptance: what an app takes depends on its limits and its model, which no schema says.
ignored_auth, object_level_authorization: keys are optional; tests/serve_apps/gateway/test_access.py has them.
use_after_free, ensure_resource_availability: nothing is created over HTTP.
"""


def document() -> dict[str, Any]:
    async def refresh() -> AppTable:
        return AppTable()

    return build_api(GatewayService(StubBackend(), refresh, Access())).openapi()


def deep(schema: dict[str, Any]) -> dict[str, Any]:
    """The document of this one gateway: with the model that it has, and as much time as there is."""
    for name, component in schema["components"]["schemas"].items():
        if name.endswith("Request"):
            one = ["chat"] if "model" in component.get("required", ()) else ["chat", None]
            component["properties"]["model"] = {"enum": one}
    for path in schema["paths"].values():
        for operation in path.values():
            operation["parameters"] = [one for one in operation["parameters"] if one["name"] != HEADER]
    return schema


ALIKE = frozenset(
    {"/pooling", "/score", "/rerank", "/v1/responses/input_tokens", "/v1/messages/count_tokens"}
)
"""Paths whose bodies are much like those of others; they are left to the longer search."""


def answered(gateway: RunningGateway) -> list[dict[str, Any]]:
    """The lines of requests. There are no others but uvicorn's own, about what is no HTTP."""
    lines = gateway.lines()
    others = {line["message"] for line in lines if "status" not in line}
    assert others <= {"Invalid HTTP request received."}
    return [line for line in lines if "status" in line]


def assert_document_holds(
    folder: Path, examples: int, without: frozenset[str] = frozenset(), *, only_deep: bool = False
) -> None:
    with running_gateway(folder, limits={"max_tokens": 10**9}) as gateway:
        schema = httpx.get(f"{gateway.url}/openapi.json", timeout=20).json()
        schema["paths"] = {path: one for path, one in schema["paths"].items() if path not in without}
        if not only_deep:
            # As it is: a time of nearly nothing is over at once, and nothing else gets a 5xx.
            others = [one for one in CHECKS if one != "not_a_server_error"]
            fuzz(folder, gateway.url, schema, examples, others)
        failed = {(line["status"], line["error"]) for line in answered(gateway) if line["status"] >= 500}
        assert failed <= {(504, "timeout")}
        fuzz(folder, gateway.url, deep(schema), examples, CHECKS)
        answers = Counter((line["endpoint"], line["status"]) for line in answered(gateway))
    for path, operations in schema["paths"].items():
        if "requestBody" in operations.get("post", {}):
            # It has been in the depths of each.
            assert answers[path, 200] > 5, answers
            assert answers[path, 400] > 5, answers


@pytest.mark.slow
def test_no_answer_is_undocumented(tmp_path: Path) -> None:
    assert_document_holds(tmp_path, examples=3, without=ALIKE, only_deep=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_answer_is_undocumented_in_a_longer_search(tmp_path: Path) -> None:
    assert_document_holds(tmp_path, examples=250)


def test_every_operation_documents_what_it_can_answer_with() -> None:
    schema = document()
    statuses = {
        f"{method} {path}": {int(status) for status in operation["responses"]}
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }
    any_route = {200, 400, 408, 431, 500, 503}
    post = any_route | {401, 404, 413, 415, 429, 504}
    assert statuses == {
        "get /health": any_route,
        "get /ready": any_route,
        "get /ping": any_route,
        "post /ping": any_route,
        "get /version": any_route,
        "get /metrics": any_route | {401, 403},
        "get /load": any_route | {401, 403},
        "get /apps": any_route | {401},
        "get /v1/models": any_route | {401},
        "get /v1/models/{model}": any_route | {401, 404},
        "get /tokenizer_info": any_route | {401, 403, 404, 429, 504},
        "post /v1/completions": post,
        "post /v1/chat/completions": post,
        "post /v1/responses": post,
        "post /v1/responses/input_tokens": post,
        "post /v1/messages": post,
        "post /v1/messages/count_tokens": post,
        "post /v1/embeddings": post,
        "post /pooling": post,
        "post /score": post,
        "post /rerank": post,
        "post /tokenize": post,
        "post /detokenize": post,
    }


def test_answers_have_their_forms_headers_and_keys_in_the_document() -> None:
    schema = document()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        operation = schema["paths"][path]["post"]
        answer = operation["responses"]["200"]
        assert answer["content"].keys() == {"application/json", "text/event-stream"}
        assert {name for name, header in answer["headers"].items() if header["required"]} == {"x-request-id"}
        assert answer["headers"].keys() == {"x-request-id", "x-shoal-replica", "x-shoal-model-version"}
        assert operation["responses"]["429"]["headers"]["Retry-After"]["required"]
        assert operation["security"] == [{}, {"bearer": []}]
        assert {parameter["name"] for parameter in operation["parameters"]} == {
            *("x-request-id", "x-request-timeout-s"),
        }
    forms = schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert forms.keys() == {"text/plain", "application/openmetrics-text"}
    assert schema["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["suffix"]["enum"] == [None, ""]
    assert "user" in fields
