"""A model served from the command line with one and with two ranks answers what `generate` answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.clusters import LiveCluster, shoal
from tests.serve_apps.tiny_model import make_model

PROMPTS = ["def main():", "import os\nimport sys\n", "x", "class A:\n    pass\n\n\nclass B"]
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def config(running_cluster: LiveCluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The running cluster's config, with one app of one rank and one of two."""
    path = tmp_path_factory.mktemp("serve") / "shoal.yaml"
    cluster = running_cluster.config_path.read_text().replace("./", f"{running_cluster.config_path.parent}/")
    path.write_text(
        f"{cluster}serve_apps:\n  one: {{model: {model}}}\n  two: {{model: {model}, tensor: 2}}\n"
    )
    return path


@pytest.fixture(scope="module")
def served(config: Path) -> Iterator[dict[str, Any]]:
    """What `shoal serve` says; both apps are taken down by `shoal unserve`."""
    done = shoal("serve", "--json", "-f", str(config))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    yield document
    for app in ("one", "two"):
        done = shoal("unserve", app, "--json", "-f", str(config))
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["apps"] == []
    gone = httpx.get(document["base_url"] + "/models").json()
    assert gone["data"] == []


def whole_characters(text: str) -> str:
    """Without the character that the last tokens began; random weights do not end where characters do."""
    return text.rstrip("\ufffd")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """The greedy answer of transformers to each prompt, alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        answers[prompt] = whole_characters(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def test_serve_says_what_is_served(served: dict[str, Any], model: Path) -> None:
    assert served["base_url"].startswith("http://127.")
    promised = ("name", "model", "status", "replicas", "engine", "tensor")
    both = {"model": model.name, "status": "running", "replicas": 1, "engine": "torch"}
    assert [{key: row[key] for key in promised} for row in served["apps"]] == [
        {"name": "one", **both, "tensor": 1},
        {"name": "two", **both, "tensor": 2},
    ]


@pytest.mark.parametrize("app", ["one", "two"])
def test_greedy_answers_equal_those_of_transformers(
    app: str, served: dict[str, Any], expected: dict[str, str]
) -> None:
    client = openai.OpenAI(base_url=served["base_url"], api_key="none", max_retries=0)

    def whole(prompt: str) -> str:
        answer = client.completions.create(model=app, prompt=prompt, max_tokens=TOKENS, temperature=0)
        return whole_characters(answer.choices[0].text)

    def streamed(prompt: str) -> str:
        chunks = client.completions.create(
            model=app, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
        )
        return whole_characters("".join(chunk.choices[0].text for chunk in chunks))

    assert {prompt: whole(prompt) for prompt in PROMPTS} == expected
    # And all at once, in one batch.
    with ThreadPoolExecutor() as pool:
        for ask in (whole, streamed):
            assert dict(zip(PROMPTS, pool.map(ask, PROMPTS), strict=True)) == expected


@pytest.mark.parametrize("app", ["one", "two"])
def test_embeddings_tokens_and_structured_answers_come_over_http(
    app: str, served: dict[str, Any], model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    client = openai.OpenAI(base_url=served["base_url"], api_key="none", max_retries=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokenizer(PROMPTS[0])["input_ids"]
    url = served["base_url"].removesuffix("/v1")
    answer = httpx.post(f"{url}/tokenize", json={"model": app, "prompt": PROMPTS[0]}).json()
    assert answer["tokens"] == ids
    back = httpx.post(f"{url}/detokenize", json={"model": app, "tokens": ids}).json()
    assert back["prompt"] == tokenizer.decode(ids)
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    embedding = client.embeddings.create(model=app, input=PROMPTS[0]).data[0].embedding
    assert embedding == pytest.approx(states.mean(dim=0).tolist(), abs=1e-3)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = client.chat.completions.create(
        model=app,
        messages=[{"role": "user", "content": "go"}],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        max_tokens=60,
        seed=3,
    )
    assert json.loads(text.choices[0].message.content or "")["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model=app,
            prompt="a",
            extra_body={
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
            },
        )
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("app", ["one", "two"])
def test_evaluations_and_vllms_clients_get_what_the_model_itself_says(
    app: str, served: dict[str, Any], model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    client = openai.OpenAI(base_url=served["base_url"], api_key="none", max_retries=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokenizer(PROMPTS[1])["input_ids"]
    with torch.no_grad():
        output = reference(torch.tensor([ids]), output_hidden_states=True)
    logprobs = output.logits[0].log_softmax(-1)
    expected = [logprobs[at, token].item() for at, token in enumerate(ids[1:])]

    for prompt, stream in ((PROMPTS[1], False), (ids, False), (PROMPTS[1], True)):
        asked: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 0, "temperature": 0}
        answer = client.completions.create(model=app, prompt=prompt, stream=stream, **asked)
        (choice,) = (next(iter(answer)) if stream else answer).choices
        assert choice.text == PROMPTS[1]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
        assert choice.finish_reason == "length"
    url = served["base_url"].removesuffix("/v1")

    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{url}{path}", json={"model": app, **body}, timeout=60).json()

    scored = post("/v1/completions", prompt=ids, prompt_logprobs=1, max_tokens=1, truncate_prompt_tokens=3)
    assert scored["usage"]["prompt_tokens"] == 3
    assert [one and next(iter(one)) for one in scored["choices"][0]["prompt_logprobs"]] == [
        None,
        *(str(token) for token in ids[-2:]),
    ]
    choice = post("/v1/completions", prompt="x", structured_outputs={"choice": ["yes", "no"]}, max_tokens=9)
    assert choice["choices"][0]["text"] in ("yes", "no")
    refused = post("/v1/completions", prompt="x", structured_outputs={"regex": "("})["error"]
    assert (refused["param"], refused["code"]) == ("structured_outputs", "invalid_value")
    long = "def main(): pass\n" * 6
    cached = [
        post("/v1/completions", prompt=long, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 96]
    ids_only = post("/tokenize", prompt="ab", return_token_strs=True)
    assert ids_only["token_strs"] == ["a", "b"]
    assert httpx.get(f"{url}/tokenizer_info", params={"model": app}).json()["eos_token"] == "<|end|>"
    assert httpx.get(f"{url}/tokenizer_info").status_code == 400

    def mean(text: str) -> torch.Tensor:
        with torch.no_grad():
            states = reference(torch.tensor([tokenizer(text)["input_ids"]]), output_hidden_states=True)
        return states.hidden_states[-1][0].mean(dim=0)

    ranked = post("/rerank", query=PROMPTS[0], documents=PROMPTS[1:])["results"]
    for one in ranked:
        alike = torch.cosine_similarity(mean(PROMPTS[0]), mean(PROMPTS[1:][one["index"]]), dim=0)
        assert one["relevance_score"] == pytest.approx(alike.item(), abs=1e-4)
    assert [one["relevance_score"] for one in ranked] == sorted(
        (one["relevance_score"] for one in ranked), reverse=True
    )
    assert post("/v1/embeddings", input="a", dimensions=4)["error"]["param"] == "dimensions"


def test_every_chat_says_how_it_ends(served: dict[str, Any]) -> None:
    """Twenty-four at once, of a model whose tokens are bytes: most of them are a part of a character."""
    client = openai.OpenAI(base_url=served["base_url"], api_key="none", max_retries=0)

    def ask(seed: int) -> tuple[list[str | None], int]:
        chunks = client.chat.completions.create(
            model="one",
            messages=[{"role": "user", "content": "鱼🎣"}],
            max_tokens=40,
            temperature=1,
            seed=seed,
            n=2,
            stop=["ab"],
            stream=True,
            stream_options={"include_usage": True},
        )
        *answers, last = list(chunks)
        reasons: list[str | None] = [None, None]
        for chunk in answers:
            (choice,) = chunk.choices
            assert reasons[choice.index] is None
            reasons[choice.index] = choice.finish_reason
        assert last.usage is not None
        return reasons, last.usage.completion_tokens

    with ThreadPoolExecutor(24) as pool:
        for reasons, tokens in pool.map(ask, range(24)):
            assert set(reasons) <= {"stop", "length"}
            assert tokens >= (40 if "length" in reasons else 1)


@pytest.mark.parametrize("app", ["one", "two"])
def test_requests_that_leave_no_token_hurt_nobody(
    app: str, served: dict[str, Any], expected: dict[str, str]
) -> None:
    """Twenty under load: a schema that is complete long before the least number of tokens."""
    client = openai.OpenAI(base_url=served["base_url"], api_key="none", max_retries=0)
    replicas: set[str] = set()

    def good(prompt: str) -> bool:
        raw = client.completions.with_raw_response.create(
            model=app, prompt=prompt, max_tokens=TOKENS, temperature=0
        )
        replicas.add(raw.headers["x-shoal-replica"])
        return whole_characters(raw.parse().choices[0].text) == expected[prompt]

    def bad(number: int) -> tuple[str, str | None]:
        schema = {"name": "n", "schema": {"enum": ["a"]}}
        chunks = client.chat.completions.create(
            model=app,
            messages=[{"role": "user", "content": "go"}],
            response_format={"type": "json_schema", "json_schema": schema},
            temperature=number % 2,
            max_tokens=60,
            stream=True,
            extra_body={"min_tokens": 50, "repetition_penalty": (0.01, 100)[number // 2 % 2]},
        )
        choices = [chunk.choices[0] for chunk in chunks]
        return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(good, prompt) for prompt in PROMPTS * 2]
        answers = [pool.submit(bad, number) for number in range(20)]
        asked += [pool.submit(good, prompt) for prompt in PROMPTS * 5]
        assert [answer.result() for answer in answers] == [('"a"', "stop")] * 20
        assert all(one.result() for one in asked)
    assert len(replicas) == 1, "the replica was never replaced"


def test_serving_again_changes_nothing(served: dict[str, Any], config: Path) -> None:
    done = shoal("serve", "two", "--json", "-f", str(config))
    assert done.returncode == 0, done.stderr
    (before,), (after,) = served["apps"][1:], json.loads(done.stdout)["apps"]
    # What it was asked meanwhile may have been worth an event.
    assert {**after, "events": None} == {**before, "events": None}
    began = [[event for event in row["events"] if event["kind"] == "began"] for row in (before, after)]
    assert began[0] == began[1]


def test_unknown_apps_and_models_are_wrong_requests(config: Path) -> None:
    for arguments in (("serve", "three"), ("unserve", "three")):
        done = shoal(*arguments, "-f", str(config))
        assert done.returncode == 2
        assert "three" in done.stderr
        assert "Traceback" not in done.stderr
