"""Rows become requests with the checks of the HTTP interface, and what is wrong with one is a sentence."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cluster.config.sections.serve import LimitsConfig
from cluster.errors import RequestError
from serve_apps.batch.manifest import Totals
from serve_apps.batch.rows import RESULTS, RowReader, RowResult, check_options, totals, with_results
from serve_apps.openai.errors import ApiError

READER = RowReader("chat", {"temperature": 0.5, "max_tokens": 8}, LimitsConfig(max_tokens=100))


def refused(row: dict[str, Any], reader: RowReader = READER) -> str:
    with pytest.raises(ApiError) as error:
        reader.request(row)
    return error.value.message


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3]])
def test_a_prompt_is_text_or_token_ids(prompt: Any) -> None:
    request = READER.request({"id": 7, "prompt": prompt})
    assert request.prompt == {"prompt": prompt}
    assert request.max_tokens == 8
    assert request.sampling["temperature"] == 0.5


def test_columns_stand_for_the_options_where_they_are_not_null() -> None:
    row = {"prompt": "x", "temperature": 0, "max_tokens": None, "seed": 3, "stop": ["a", "b"], "top_p": None}
    request = READER.request(row)
    assert (request.sampling["temperature"], request.max_tokens) == (0.0, 8)
    assert (request.sampling["seed"], request.sampling["stop"]) == (3, ("a", "b"))
    assert request.sampling["top_p"] == 1.0


def test_messages_lose_what_parquet_says_only_for_others() -> None:
    turns = [
        {"role": "system", "content": "be brief", "name": None},
        {"role": "user", "content": "hi", "name": "ann"},
    ]
    request = READER.request({"prompt": None, "messages": turns})
    assert request.prompt == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi", "name": "ann"},
        ]
    }


def test_a_wrong_row_says_what_is_wrong() -> None:
    turns = [{"role": "user", "content": "hi"}]
    assert refused({"prompt": None}) == "The row's 'prompt' is null."
    assert refused({"prompt": None, "messages": None}) == "The row's 'prompt' and 'messages' are null."
    assert "both" in refused({"prompt": "x", "messages": turns})
    assert "'prompt' is wrong" in refused({"prompt": [-1]})
    assert "'messages'" in refused({"messages": []})
    assert "'messages.0.role'" in refused({"messages": [{"role": "nobody", "content": "x"}]})
    assert "'messages.0.content' is required" in refused({"messages": [{"role": "user", "content": None}]})
    assert "'temperature'" in refused({"prompt": "x", "temperature": 2.5})
    assert refused({"prompt": "x", "max_tokens": 101}) == "'max_tokens' is 101; 'chat' gives at most 100."


def test_an_answer_has_what_the_row_asks_or_what_fits() -> None:
    asked = READER.request({"prompt": "x"})
    assert asked.fit(90, 98, 100).max_tokens == 8
    with pytest.raises(ApiError, match="maximum context length is 98 tokens, but the prompt has 91"):
        asked.fit(91, 98, 100)
    free = RowReader("chat", {}, LimitsConfig(max_tokens=100)).request({"prompt": "x"})
    assert free.fit(90, 98, 100).max_tokens == 8
    assert free.fit(10, 1000, 100).max_tokens == 100
    with pytest.raises(ApiError, match="Shorten the prompt"):
        free.fit(98, 98, 100)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 3.0}, "'temperature'"),
        ({"top_p": 0.0}, "'top_p'"),
        ({"max_tokens": 101}, "at most 100"),
        ({"stop": [""]}, "'stop'"),
        ({"colour": 1}, "Unknown parameter 'colour'"),
    ],
)
def test_wrong_options_are_wrong_requests(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        check_options("chat", options, LimitsConfig(max_tokens=100))


def test_results_stand_beside_their_rows() -> None:
    table = pa.table({"id": [1, 2]})
    results = [RowResult("yes", "stop", 3, 4), RowResult(error="no")]
    done = with_results(table, results, "m@1")
    assert done.schema == pa.schema([("id", pa.int64()), *RESULTS])
    assert done.to_pylist() == [
        {
            "id": 1,
            "answer": "yes",
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "model_version": "m@1",
            "error": None,
        },
        {
            "id": 2,
            "answer": None,
            "finish_reason": None,
            "prompt_tokens": None,
            "completion_tokens": None,
            "model_version": "m@1",
            "error": "no",
        },
    ]
    assert totals(results) == Totals(rows=2, failed=1, prompt_tokens=3, completion_tokens=4)
