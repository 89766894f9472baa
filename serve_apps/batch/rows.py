"""From a row of the input to a request of the engine, with the checks that the HTTP interface makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from cluster.config.sections.serve import LimitsConfig
from cluster.errors import RequestError
from serve_apps.batch.manifest import Totals
from serve_apps.engine.protocol import SamplingParams
from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.errors import ApiError, bad_request
from serve_apps.openai.parse import parse
from serve_apps.openai.schema import CompletionRequest, Request
from serve_apps.replica.fit import fit, most_tokens

RESULTS = pa.schema(
    [
        ("answer", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("model_version", pa.string()),
        ("error", pa.string()),
    ]
)
"""The columns that the output adds; of a row, either `error` or the others are null (never the version)."""
OVERRIDES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
)
"""Columns of the input that stand, where not null, for the command's option of that name."""


@dataclass(frozen=True)
class RowRequest:
    """What a row asks for."""

    prompt: Mapping[str, Any]
    """`prompt` or `messages`, for `Prompts.encode`."""
    max_tokens: int | None
    """None: as many as the app allows and the context has room for."""
    sampling: Mapping[str, Any]
    """The other fields of SamplingParams."""

    def fit(self, prompt_tokens: int, context_length: int, limit: int | None) -> SamplingParams:
        """The sampling of a prompt of so many tokens.

        Raises:
            ApiError: prompt and answer do not fit in the model's context.
        """
        return fit(
            self.prompt,
            prompt_tokens,
            context_length,
            asked=self.max_tokens,
            limit=limit,
            sampling=self.sampling,
        )


class RowReader:
    """Turns rows into requests.

    Args:
        options: fields of a request that hold for all rows, see `check_options`.
        limits: the app's.
    """

    def __init__(self, app: str, options: Mapping[str, Any], limits: LimitsConfig) -> None:
        self._app = app
        self._options = options
        self._limits = limits

    def request(self, row: Mapping[str, Any]) -> RowRequest:
        """What one row asks for.

        Raises:
            ApiError: a field of it is wrong.
        """
        given = {name: row[name] for name in ("prompt", "messages") if row.get(name) is not None}
        if len(given) != 1:
            names = " and ".join(repr(name) for name in ("prompt", "messages") if name in row)
            raise bad_request(
                "The row has both 'prompt' and 'messages'; leave one of them null."
                if given
                else f"The row's {names} {'are' if ' and ' in names else 'is'} null."
            )
        overrides = {name: row[name] for name in OVERRIDES if row.get(name) is not None}
        kind: type[Request] = CompletionRequest
        if "messages" in given:
            kind, given = ChatRequest, {"messages": _without_nulls(given["messages"])}
        request = parse(kind, {"model": self._app, **self._options, **overrides, **given})
        most = most_tokens(request, self._limits)
        prompt: dict[str, Any]
        if isinstance(request, ChatRequest):
            prompt = {"messages": [message.for_template() for message in request.messages]}
        else:
            assert isinstance(request, CompletionRequest)
            (one,) = request.prompt
            prompt = {"prompt": one}
        return RowRequest(prompt, most, request.sampling())


def check_options(app: str, options: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Check the fields of a request that are to hold for all rows, as the HTTP interface checks them.

    Raises:
        RequestError: one of them is wrong.
    """
    try:
        most_tokens(parse(CompletionRequest, {"model": app, "prompt": "", **options}), limits)
    except ApiError as error:
        raise RequestError(error.message) from error


@dataclass(frozen=True)
class RowResult:
    """What became of a row: an answer or an error; the fields are columns of the output."""

    answer: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


def with_results(table: pa.Table, results: Sequence[RowResult], model_version: str) -> pa.Table:
    """The rows of a shard with what became of them, in the same order."""
    assert table.num_rows == len(results)
    columns: dict[str, list[Any]] = {
        field.name: [getattr(result, field.name) for result in results] for field in fields(RowResult)
    }
    columns["model_version"] = [model_version] * len(results)
    for field in RESULTS:
        table = table.append_column(field, pa.array(columns[field.name], field.type))
    return table


def totals(results: Sequence[RowResult]) -> Totals:
    """The sums of some rows."""
    return Totals(
        rows=len(results),
        failed=sum(result.error is not None for result in results),
        prompt_tokens=sum(result.prompt_tokens or 0 for result in results),
        completion_tokens=sum(result.completion_tokens or 0 for result in results),
    )


def _without_nulls(value: Any) -> Any:
    """Parquet has every field of a struct in every row; what is null there was not said."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
