"""What answers tell of their prompts and of tokens, as vLLM's clients and evaluations read it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from serve_apps.openai.format import ChoiceEvent, CompletionFormat, Gathered, Heading, usage
from tests.serve_apps.stub_gateway import StubGateway

HELLO = [{"role": "user", "content": "a b"}]


def post(path: str, gateway: StubGateway | None = None, **body: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with (gateway or StubGateway()).client() as http:
            return await http.post(path, json={"model": "chat", **body})

    return asyncio.run(go())


def completion(**body: Any) -> dict[str, Any]:
    answer = post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def chunks(path: str, gateway: StubGateway | None = None, **body: Any) -> list[dict[str, Any]]:
    answer = post(path, gateway, stream=True, **body)
    assert answer.status_code == 200, answer.text
    *events, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_an_echo_has_the_prompt_before_the_answer_and_its_log_probabilities() -> None:
    (choice,) = completion(prompt="one two", echo=True, logprobs=1, max_tokens=2)["choices"]
    assert choice["text"] == "one two 0 1"
    assert choice["logprobs"] == {
        "tokens": ["one", " two", " 0", " 1"],
        "token_logprobs": [None, -0.25, -0.5, -0.5],
        "top_logprobs": [None, {"t0": -0.5, " two": -0.25}, {" 0": -1.0}, {" 0": -1.0, " 1": -0.5}],
        "text_offset": [0, 3, 7, 9],
    }
    assert choice["finish_reason"] == "length"


def test_an_echo_alone_generates_nothing() -> None:
    answer = completion(prompt="one two", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "one two"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert choice["logprobs"]["top_logprobs"] == [None, {" two": -0.25}]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    (choice,) = completion(prompt="one two", echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("one two", None)
    assert "prompt_logprobs" not in choice


def test_each_choice_echoes_its_own_prompt() -> None:
    answer = completion(prompt=["a", "b c"], echo=True, n=2, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == ["a 0", "a 0", "b c 0", "b c 0"]
    answer = completion(prompt=[[7, 8], [9]], echo=True, max_tokens=1, logprobs=0)
    assert [choice["text"] for choice in answer["choices"]] == ["#7 #8 0", "#9 0"]
    assert [choice["logprobs"]["text_offset"] for choice in answer["choices"]] == [[0, 2, 5], [0, 2]]


def test_a_long_text_with_several_answers_is_echoed_as_it_was_sent() -> None:
    """Its tokens go in its place, and need not give the same text back."""
    text = "word" * 2000 + "  end"
    answer = completion(prompt=text, echo=True, n=2, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == [text + " 0"] * 2


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_echoes_once_and_its_parts_are_the_whole(max_tokens: int) -> None:
    asked = {"prompt": "one two", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    parts = [chunk["choices"][0] for chunk in chunks("/v1/completions", **asked)]
    (whole,) = completion(**asked)["choices"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, value in whole["logprobs"].items():
        assert [one for part in parts for one in part["logprobs"][name]] == value
    assert parts[0]["text"].startswith("one two")


def test_an_echo_is_sent_once_though_its_replica_was_lost_before_anything_was_seen() -> None:
    gateway = StubGateway()
    gateway.backend.script = [0, 0, None]
    parts = chunks("/v1/completions", gateway, prompt="one two", echo=True, max_tokens=3)
    assert "".join(chunk["choices"][0]["text"] for chunk in parts) == "one two 0 1 2"
    gateway.backend.script = [1, 2, None]
    answer = post("/v1/completions", gateway, prompt="one two", echo=True, max_tokens=3, prompt_logprobs=0)
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "one two 0 1 2"
    assert len(choice["prompt_logprobs"]) == 2


def test_prompt_logprobs_are_told_by_ids_as_vllm_does() -> None:
    (choice,) = completion(prompt="one two", prompt_logprobs=1, max_tokens=1)["choices"]
    expected = [
        None,
        {
            "1": {"logprob": -0.25, "rank": 2, "decoded_token": " two"},
            "900": {"logprob": -0.5, "rank": 1, "decoded_token": "t0"},
        },
    ]
    assert choice["prompt_logprobs"] == expected
    assert list(choice["prompt_logprobs"][1]) == ["1", "900"]
    assert choice["text"] == " 0"
    answer = post("/v1/chat/completions", messages=HELLO, prompt_logprobs=0).json()
    assert [one and list(one) for one in answer["prompt_logprobs"]] == [None, ["1"]]


def test_token_ids_are_told_where_they_are_asked_for() -> None:
    (choice,) = completion(prompt=[7, 8], return_token_ids=True, max_tokens=3)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8], [100, 101, 102])
    parts = [c["choices"][0] for c in chunks("/v1/completions", prompt=[7], return_token_ids=True)]
    assert parts[0]["prompt_token_ids"] == [7]
    assert all("prompt_token_ids" not in part for part in parts[1:])
    assert [token for part in parts for token in part["token_ids"]] == [100, 101, 102]
    answer = post("/v1/chat/completions", messages=HELLO, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == [0, 1]
    assert answer["choices"][0]["token_ids"] == [100, 101, 102]
    first, *others = chunks("/v1/chat/completions", messages=HELLO, return_token_ids=True)
    assert first["prompt_token_ids"] == [0, 1]
    assert all("prompt_token_ids" not in chunk for chunk in others)
    choices = [choice for chunk in (first, *others) for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [100, 101, 102]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_usage_says_what_was_in_the_cache(path: str) -> None:
    gateway = StubGateway()
    body: dict[str, Any] = {"prompt": ["a b c"] * 2} if path == "/v1/completions" else {"messages": HELLO}
    assert "prompt_tokens_details" not in post(path, gateway, **body).json()["usage"]
    for cached in (0, 2):
        gateway.backend.cached_tokens = cached
        prompts = len(body.get("prompt", [1]))
        expected = {"cached_tokens": cached * prompts}
        # The answers to one prompt read it once.
        assert post(path, gateway, **body, n=2).json()["usage"]["prompt_tokens_details"] == expected
        *_, last = chunks(path, gateway, **body, stream_options={"include_usage": True})
        assert last["usage"]["prompt_tokens_details"] == expected


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_may_say_all_along_what_was_taken(path: str) -> None:
    body: dict[str, Any] = {"prompt": "a b c"} if path == "/v1/completions" else {"messages": HELLO}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = chunks(path, StubGateway(), **body, stream_options=options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == last["usage"]["completion_tokens"]
    assert {part["usage"]["prompt_tokens"] for part in parts} == {last["usage"]["prompt_tokens"]}
    only = chunks(path, StubGateway(), **body, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in part for part in only)  # as in vLLM


def test_openais_client_reads_both() -> None:
    gateway = StubGateway()
    gateway.backend.cached_tokens = 1

    async def go() -> Any:
        async with gateway.client() as http:
            client = openai.AsyncOpenAI(
                base_url="http://gateway/v1", api_key="none", http_client=http, max_retries=0
            )
            return await client.completions.create(model="chat", prompt="a b", echo=True, logprobs=1)

    answer = asyncio.run(go())
    assert answer.choices[0].logprobs.token_logprobs[:2] == [None, -0.25]
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_how_a_prompt_is_to_be_read_reaches_the_replica() -> None:
    gateway = StubGateway()
    fields = {
        "truncate_prompt_tokens": 5,
        "truncation_side": "right",
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "bad_words": ["x"],
        "allowed_token_ids": [1, 2],
    }
    assert post("/v1/completions", gateway, prompt="a", **fields).status_code == 200
    (request,) = gateway.backend.requests
    assert {k: request[k] for k in ("cut", "cut_side", "special_tokens", "names_are_ids")} == {
        "cut": 5,
        "cut_side": "right",
        "special_tokens": False,
        "names_are_ids": True,
    }
    sampling = request["sampling"]
    assert sampling["skip_special_tokens"] is False
    assert sampling["include_stop"] is True
    assert (sampling["bad_words"], sampling["allowed_token_ids"]) == (("x",), (1, 2))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"truncate_prompt_tokens": 20}, 200),
        ({"truncate_prompt_tokens": -1}, 200),
        ({"truncate_prompt_tokens": 65}, 400),
        ({"truncate_prompt_tokens": 64}, 400),
        ({}, 400),
    ],
    ids=str,
)
def test_a_prompt_of_ids_is_refused_by_what_is_left_of_it(fields: dict[str, Any], status: int) -> None:
    gateway = StubGateway()
    answer = post("/v1/completions", gateway, prompt=[1] * 200, max_tokens=4, **fields)
    # The stub reads all of it, and would refuse it: that it was asked is what counts.
    assert bool(gateway.backend.requests) == (status == 200), answer.text


def test_special_tokens_count_in_offsets_where_they_are_in_the_text() -> None:
    heading = Heading(
        "1",
        1,
        "chat",
        1,
        with_logprobs=True,
        with_usage=False,
        echo=True,
        prompts=[None],
        with_special_tokens=True,
    )

    def offsets(text: str) -> list[int]:
        prompt = {
            "text": text,
            "logprobs": [
                ("<s>", b"", None, [], 1, None),
                ("h", b"h", -1.0, [], 2, 1),
                ("<i>", b"", -1.0, [], 3, 1),
            ],
        }
        logprobs = [("\ufffd", "é".encode()[:1], -1.0, []), ("\ufffd", "é".encode()[1:], -1.0, [])]
        logprobs += [("<e>", b"", -1.0, []), ("x", b"x", -1.0, [])]
        item = {"text": "é<e>x", "token_ids": [1] * 4, "logprobs": logprobs, "prompt": prompt}
        gathered = Gathered(1)
        gathered.add(ChoiceEvent(0, item))
        (choice,) = CompletionFormat(heading).answer(gathered, usage([1], gathered))["choices"]
        assert choice["logprobs"] is not None
        return choice["logprobs"]["text_offset"]

    assert offsets("<s>h<i>") == [0, 3, 4, 7, 7, 8, 11]
    assert offsets("h<i>") == [0, 0, 1, 4, 4, 5, 8]
