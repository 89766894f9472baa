"""The gateway's OpenAPI document: what each route takes, and every answer that it can give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter

from serve_apps.gateway.metrics import OPEN_METRICS, TEXT
from serve_apps.http.deadline import HEADER
from serve_apps.openai.answers import ErrorAnswer

ANY_ROUTE = (400, 408, 431, 500, 503)
"""Refusals that have nothing to do with the route: what is no HTTP, is too large, comes too slowly."""
MODEL_POST = (400, 401, 404, 408, 413, 415, 429, 431, 500, 503, 504)

_SAYS = {
    400: "A field or a header is wrong, or the request is not HTTP that can be read.",
    401: "The API key is missing or not valid.",
    403: "The API key does not open this.",
    404: "There is no such model, or none that the API key opens.",
    408: "The request arrived too slowly.",
    413: "The request's body is too large.",
    415: "The request's body is not JSON.",
    429: "Too many requests wait, or the tenant has used up its minute.",
    431: "The request's line and headers are too large.",
    500: "The gateway or a replica failed.",
    503: "It cannot be answered now; the request may be sent again.",
    504: "The request's time, or the app's, was over.",
}
_SCHEMAS = "#/components/schemas/{model}"
_STRING = {"type": "string"}
_SCHEME = "bearer"


def refusals(statuses: Iterable[int], error: type[Any] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can answer with these errors.

    By reference: of a model FastAPI makes a validator for each route and status, and none is used.
    """
    content = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=error.__name__)}}}
    return {status: {"content": content, "description": _SAYS[status]} for status in statuses}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The request body's part of the document; bodies are read by hand, to bound them."""
    reference = {"$ref": _SCHEMAS.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def streamed_too(chunk: type[Any]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route whose answer may be a stream of such chunks."""
    documents = [{"$ref": _SCHEMAS.format(model=kind.__name__)} for kind in (chunk, ErrorAnswer)]
    as_json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": documents}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, as_json]}
    event = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return {
        200: {
            "content": {"text/event-stream": {"itemSchema": event}},
            "description": "The answer. With `stream` its parts (comments while it waits), then [DONE],"
            " or an error in place of it.",
        }
    }


def events_too(event: type[Any]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route whose answer may be a stream of events with names."""
    reference = {"$ref": _SCHEMAS.format(model=event.__name__)}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": reference}
    item = {"type": "object", "required": ["event", "data"], "properties": {"event": _STRING, "data": data}}
    return {
        200: {
            "content": {"text/event-stream": {"itemSchema": item}},
            "description": "The answer. With `stream` events, of which the last says how it ended.",
        }
    }


def metrics_page() -> dict[int | str, dict[str, Any]]:
    """The `responses` of the page that Prometheus reads."""
    forms = {form.partition(";")[0]: {"schema": _STRING} for form in (TEXT, OPEN_METRICS)}
    return {200: {"content": forms, "description": "Counters; exemplars in the form of OpenMetrics only."}}


def openapi_document(
    api: FastAPI, bodies: Iterable[type[BaseModel]], answers: Iterable[type[Any]], *, ignore_unknown: bool
) -> dict[str, Any]:
    """The document of an API whose POST routes take these bodies.

    Args:
        answers: what is answered besides the routes' models: the parts of streams, and errors.
        ignore_unknown: bodies may have fields that nobody knows.
    """
    document = get_openapi(title=api.title, version=api.version, summary=api.summary, routes=api.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for kind in (*bodies, *answers):
        schema = TypeAdapter(kind).json_schema(ref_template=_SCHEMAS)
        schemas.update(schema.pop("$defs", {}))
        schema["properties"].update(_without_effect(kind))
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = True if ignore_unknown else {"enum": [None, [], {}, ""]}
        schemas[kind.__name__] = schema
    components["securitySchemes"] = {
        _SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "A key of the gateway's key file, where it has one.",
        }
    }
    for path in document["paths"].values():
        for operation in path.values():
            _complete(operation, asks_a_model="requestBody" in operation)
    return document


def _without_effect(kind: type[BaseModel]) -> dict[str, Any]:
    """Fields that are taken, and do nothing: with any value, or with those that ask for nothing."""
    ignored: frozenset[str] = getattr(kind, "IGNORED", frozenset())
    neutral: Mapping[str, tuple[Any, ...]] = getattr(kind, "NEUTRAL", {})
    return {
        **{name: {"description": "Changes nothing."} for name in sorted(ignored)},
        **{
            name: {"enum": [None, *values], "description": "Not supported; these values ask for nothing."}
            for name, values in neutral.items()
        },
    }


def _complete(operation: dict[str, Any], *, asks_a_model: bool) -> None:
    """Add what all operations share: ids, headers, keys."""
    responses: dict[str, Any] = operation["responses"]
    responses.pop("422", None)  # FastAPI's own; nothing here answers with it
    parameters = operation.setdefault("parameters", [])
    parameters.append(
        _header_parameter("x-request-id", "The request's id, 1 to 128 printable characters.", _STRING)
    )
    if asks_a_model:
        seconds = {"type": "number", "exclusiveMinimum": 0}
        parameters.append(_header_parameter(HEADER, "Seconds after which the request is ended.", seconds))
    if "401" in responses:
        operation["security"] = [{}, {_SCHEME: []}]
    for status, response in responses.items():
        # One that waits for its first token does not know its replica yet.
        streamed = "text/event-stream" in response.get("content", {})
        response["headers"] = _headers(int(status), from_a_replica=asks_a_model, at_once=not streamed)


def _header_parameter(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _headers(status: int, *, from_a_replica: bool, at_once: bool) -> dict[str, Any]:
    headers = {"x-request-id": _header("The request's id, as given or new.", _STRING)}
    if from_a_replica:
        always = status == 200 and at_once
        headers["x-shoal-replica"] = _header("The replicas that answered.", _STRING, required=always)
        headers["x-shoal-model-version"] = _header("The model's version.", _STRING, required=always)
    if status in (429, 503):
        headers["Retry-After"] = _header("Seconds to wait.", {"type": "integer", "minimum": 1})
    if status == 401:
        headers["WWW-Authenticate"] = _header("How to send a key.", _STRING)
    return headers


def _header(description: str, schema: Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": schema}
