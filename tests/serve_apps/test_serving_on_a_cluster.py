"""Apps of a fast fake engine on a real cluster: load, faults, updates and the end, seen by clients.

The tests run in the order of the file, on one cluster; each but the last leaves the app `chat` with one
replica.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config.sections.serve import (
    AutoscaleConfig,
    LimitsConfig,
    ReplicasConfig,
    ServeAppConfig,
    UpdateConfig,
)
from cluster.errors import RequestError, ShoalError
from serve_apps.spec import AppSpec
from tests.clusters import LiveCluster
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.strangers import get, serve_run, write_app
from tests.serve_apps.tiny_model import make_tokenizer

ENGINE = "tests.serve_apps.fake_engine:FakeEngine"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Served:
    """The cluster's gateway with the app `chat` behind it."""

    url: str
    spec: AppSpec
    call: Driver

    def deploy(self, spec: AppSpec, **options: Any) -> list[dict[str, Any]]:
        return self.call(driver.deploy, spec, **options)

    def running(self) -> int:
        """Requests that the engines have now."""
        return sum(int(path.read_text() or 0) for path in Path(self.spec.model_path).glob("running-*"))

    def answering(self) -> str:
        """The replica that answers now."""
        answer = httpx.post(self.url + COMPLETIONS, json=completion(), timeout=30)
        return answer.headers["x-shoal-replica"]

    def granted(self) -> int:
        lease = self.call(driver.leases).get("app/chat")
        return lease["granted"] if lease else 0

    def replicas(self) -> int:
        return self.call(driver.running_replicas, "chat")


@pytest.fixture(scope="module")
def served(running_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("fake-model")
    make_tokenizer(directory)
    config = ServeAppConfig(
        model=str(directory),
        tensor=2,
        replicas=ReplicasConfig(min=1, max=2),
        autoscale=AutoscaleConfig(target_ongoing_requests=2.0, upscale_delay_s=0.5, downscale_delay_s=2.0),
        limits=LimitsConfig(
            max_tokens=1000, queue=100, batch=8, body_bytes=1_000_000, request_timeout_s=60.0
        ),
    )
    spec = AppSpec("chat", config, model_path=str(directory), model_version="fake@1", engine=ENGINE)
    with Driver(running_cluster.record) as call:
        served = Served(call(driver.start), spec, call)
        served.deploy(spec)
        yield served
        call(driver.stop)


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> float:
    """Seconds until the condition held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not happen in time"
        threading.Event().wait(0.05)
    return time.monotonic() - began


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": [10], "max_tokens": 5, **changes}


@contextmanager
def load(url: str, clients: int, max_tokens: int = 50) -> Iterator[list[httpx.Response]]:
    """Clients that send one request after the other from a thread of their own; their answers."""
    answers: list[httpx.Response] = []
    stop = threading.Event()

    async def client(http: httpx.AsyncClient) -> None:
        while not stop.is_set():
            answers.append(await http.post(COMPLETIONS, json=completion(max_tokens=max_tokens)))

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            await asyncio.gather(*(client(http) for _ in range(clients)))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


@asynccontextmanager
async def streaming(served: Served, **changes: Any) -> AsyncIterator[httpx.Response]:
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=60) as http,
        http.stream("POST", COMPLETIONS, json=completion(stream=True, **changes)) as answer,
    ):
        yield answer


def test_the_openai_client_is_answered(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.with_raw_response.create(model="chat", prompt=[10], max_tokens=3, logprobs=1)
    answer = whole.parse()
    assert answer.choices[0].text == " 11 12 13"
    assert answer.choices[0].finish_reason == "length"
    assert whole.headers["x-shoal-model-version"] == "fake@1"
    assert whole.headers["x-shoal-replica"]
    assert len(whole.headers.get_list("x-request-id")) == 1

    stopped = client.completions.create(model="chat", prompt=[10], max_tokens=9, stop=[" 13"], seed=1, n=2)
    assert [(c.text, c.finish_reason) for c in stopped.choices] == [(" 12", "stop"), ("", "stop")]

    # "hi" and the plain template around it: one token a byte, see make_tokenizer.
    prompt = "user: hi\nassistant:"
    chunks = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usage = [], None
    for chunk in chunks:
        texts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    first = int("".join(texts).split()[0])
    assert "".join(texts) == "".join(f" {first + step}" for step in range(40))
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 40)

    assert [model.id for model in client.models.list()] == ["chat"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        client.completions.create(model="chat", prompt="x" * 5000)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="chat", prompt=[100_000])
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.completions.create(model="chat", prompt="")


def test_what_the_engine_refuses_has_openais_shape(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=30) as http:
        for prompt, status, code in ((3, 503, "replica_lost"), (4, 429, "queue_full"), (5, 400, None)):
            answer = http.post(COMPLETIONS, json=completion(prompt=[prompt]))
            assert answer.status_code == status
            assert code in (None, answer.json()["error"]["code"])
            assert answer.headers["x-shoal-replica"]
            assert ("retry-after" in answer.headers) == (status in (429, 503))
        assert http.get("/ready").status_code == 200
        assert http.get("/nowhere").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_refused_and_hurts_no_one(served: Served, declared: bool) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 100_000

    body: Any = b"x" * 100_000_000 if declared else parts()
    with load(served.url, 1, max_tokens=5) as others, httpx.Client(base_url=served.url, timeout=60) as http:
        eventually(lambda: others)
        answer = http.post(COMPLETIONS, content=body)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert {other.status_code for other in others} == {200}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place_in_the_batch(served: Served, stream: bool) -> None:
    async def go() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:

            async def ask() -> None:
                async with http.stream(
                    "POST", COMPLETIONS, json=completion(max_tokens=1000, stream=stream)
                ) as answer:
                    await answer.aread()

            task = asyncio.create_task(ask())
            await asyncio.to_thread(eventually, lambda: served.running() == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(go())
    # Left alone it would run for 10 s.
    eventually(lambda: served.running() == 0, timeout_s=3)


def test_an_app_that_runs_as_the_config_says_is_left_alone(served: Served) -> None:
    before = served.answering()
    assert [row["status"] for row in served.deploy(served.spec)] == ["running"]
    assert served.answering() == before


@pytest.mark.slow
def test_it_scales_out_under_load_survives_the_loss_of_a_rank_and_comes_back(served: Served) -> None:
    assert served.replicas() == 1
    generated = []
    with load(served.url, clients=6) as answers:
        # The decision takes seconds; what follows is the start of a replica's processes.
        seconds = eventually(lambda: served.granted() == 2, timeout_s=10)
        assert seconds < 5
        eventually(lambda: served.replicas() == 2)
        eventually(lambda: len({a.headers.get("x-shoal-replica") for a in answers[-12:]}) == 2)

        generated.append(engine_figures(served.url)["shoal_engine_generated_tokens_total"])
        known = {a.headers.get("x-shoal-replica") for a in answers}
        asyncio.run(kill_a_rank_under_streams(served))
        generated.append(engine_figures(served.url)["shoal_engine_generated_tokens_total"])
        # A whole new group takes the lost one's place.
        eventually(lambda: {a.headers.get("x-shoal-replica") for a in answers} - known)
        eventually(lambda: served.replicas() == 2)
        generated.append(engine_figures(served.url)["shoal_engine_generated_tokens_total"])
    # Requests that had sent nothing were answered by someone else.
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {
        "".join(f" {11 + step}" for step in range(50))
    }
    eventually(lambda: served.replicas() == 1 and served.granted() == 1)
    # What the lost replica has done stays counted, and of what is gone no gauge is left.
    assert 0 < generated[0] <= generated[1] <= generated[2]
    eventually(lambda: engine_figures(served.url)["shoal_engine_running_requests"] == 0.0)
    eventually(lambda: engine_figures(served.url)["replicas"] == 1.0)
    figures = engine_figures(served.url)
    assert figures["shoal_engine_generated_tokens_total"] >= 50 * len(answers)
    assert figures["shoal_gateway_routed_total"] >= len(answers)


def engine_figures(url: str) -> dict[str, float]:
    """The sums of the gateway's figures over all labels, and how many `replicas` they are of."""
    sums: Counter[str] = Counter()
    replicas = set()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            sums[sample.name] += sample.value
            replicas.add(sample.labels.get("replica"))
    return {**sums, "replicas": float(len(replicas - {None}))}


async def kill_a_rank_under_streams(served: Served) -> None:
    """Streams on both replicas; those of the replica whose rank is killed end with an error, no others."""
    async with AsyncExitStack() as stack:
        streams: list[tuple[str, AsyncIterator[str]]] = []
        # The first ones may all go to the replica that has just come, as it has the fewest requests.
        while len(streams) < 4 or (len({replica for replica, _ in streams}) < 2 and len(streams) < 12):
            answer = await stack.enter_async_context(streaming(served, max_tokens=300))
            lines = aiter(answer.aiter_lines())
            await anext(lines)
            streams.append((answer.headers["x-shoal-replica"], lines))
        victim = streams[0][0]
        assert len({replica for replica, _ in streams}) == 2
        os.kill(await asyncio.to_thread(served.call, driver.rank_beside, victim), signal.SIGKILL)
        for replica, lines in streams:
            last = [line async for line in lines if line][-1]
            assert ("replica_lost" in last) == (replica == victim)
            assert (last == "data: [DONE]") == (replica != victim)


@pytest.mark.slow
def test_a_new_version_takes_over_without_a_failed_request(served: Served) -> None:
    with load(served.url, clients=1, max_tokens=5) as answers:
        eventually(lambda: answers)
        served.deploy(replace(served.spec, model_version="fake@2"))
        eventually(lambda: answers[-1].headers.get("x-shoal-model-version") == "fake@2")
    assert {answer.status_code for answer in answers} == {200}
    versions = [answer.headers["x-shoal-model-version"] for answer in answers]
    assert set(versions) == {"fake@1", "fake@2"}
    with httpx.Client(base_url=served.url) as http:
        assert http.get("/v1/models").json()["data"][0]["version"] == "fake@2"
    eventually(lambda: served.granted() == 1)


def test_an_app_without_room_says_what_it_wants_and_what_is_free(served: Served) -> None:
    changes = {"replicas": ReplicasConfig(min=3), "update": UpdateConfig(ready_timeout_s=1)}
    config = served.spec.config.model_copy(update=changes)
    big = replace(served.spec, name="big", config=config)
    with pytest.raises(ShoalError, match=r"3 replicas of 2 CPU.*has 2 CPU free.*chat holds 1"):
        served.deploy(big)
    assert list(served.call(driver.leases)) == ["app/chat"]


@pytest.mark.slow
def test_an_app_that_cannot_start_says_why_and_leaves_nothing(served: Served, tmp_path: Path) -> None:
    broken = replace(served.spec, name="broken", model_path=str(tmp_path / "nothing"), model_version="x@1")
    with pytest.raises(ShoalError, match=r"(?s)broken could not be started.*nothing"):
        served.deploy(broken)
    assert list(served.call(driver.leases)) == ["app/chat"]
    with httpx.Client(base_url=served.url) as http:
        assert http.get("/ready").status_code == 200


@pytest.mark.slow
def test_a_stranger_is_reached_and_when_he_ends_serve_the_app_comes_back(
    served: Served, running_cluster: LiveCluster, tmp_path: Path
) -> None:
    write_app(tmp_path, "hello", "hello from a stranger")
    with serve_run(running_cluster, tmp_path, "hello:app"):
        assert get(running_cluster.record.serve_url) == "hello from a stranger"
        assert served.answering()

    def answers() -> bool:
        with suppress(httpx.TransportError):
            return httpx.post(served.url + COMPLETIONS, json=completion(), timeout=5).status_code == 200
        return False

    eventually(answers)
    row = served.call(driver.status, "chat")
    assert row is not None
    (ended,) = [event for event in row["events"] if event["kind"] == "serve_ended"]
    assert "Serve was shut down by somebody else at " in ended["reason"]
    assert served.granted() == 1


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_ends_two_replicas_ends_no_third(served: Served, stream: bool) -> None:
    model_path = Path(served.spec.model_path)
    before = set(model_path.glob("killed-*"))
    answer = httpx.post(served.url + COMPLETIONS, json=completion(prompt=[6], stream=stream, n=3), timeout=60)
    if stream and answer.status_code == 200:  # it has waited long enough to be sent a comment
        *_, last = (event for event in answer.text.split("\n\n") if event)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engines_broke"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "engines_broke")
    assert len(set(model_path.glob("killed-*")) - before) == 2
    # The next one is left alone.
    assert httpx.post(served.url + COMPLETIONS, json=completion(), timeout=60).status_code == 200
    assert len(set(model_path.glob("killed-*")) - before) == 2


@pytest.mark.slow
def test_requests_are_spread_as_the_app_says_though_one_of_its_name_said_otherwise(served: Served) -> None:
    prompt = [10] * 300
    numbers: list[int] = []

    def taken(routing: str) -> list[int]:
        """How many of ten requests with the same prompt, one after the other, each replica took."""
        changes = {"tensor": 1, "replicas": ReplicasConfig(min=2), "routing": routing}
        served.deploy(
            replace(served.spec, name="routed", config=served.spec.config.model_copy(update=changes))
        )
        eventually(lambda: served.call(driver.running_replicas, "routed") == 2)
        numbers.append(served.call(driver.status, "routed")["rollout"]["number"])
        with httpx.Client(base_url=served.url, timeout=30) as http:
            asked = completion(model="routed", prompt=prompt)
            answers = [http.post(COMPLETIONS, json=asked) for _ in range(10)]
        served.call(driver.remove, ["routed"])
        assert {answer.status_code for answer in answers} == {200}
        return sorted(Counter(answer.headers["x-shoal-replica"] for answer in answers).values())

    assert taken("round_robin") == [5, 5]
    assert taken("prefix") == [10]
    # No Serve application has the name of an earlier one, whose handles may not be over yet.
    os.kill(served.call(driver.controller_pid), signal.SIGKILL)
    assert taken("round_robin") == [5, 5]
    assert numbers == [1, 2, 3]


def test_an_app_that_is_taken_down_finishes_what_it_has(served: Served) -> None:
    async def go() -> str:
        async with streaming(served, max_tokens=300) as answer:
            lines = aiter(answer.aiter_lines())
            await anext(lines)
            leaving = asyncio.create_task(asyncio.to_thread(served.call, driver.remove, ["chat"]))
            rest = [line async for line in lines if line]
            await leaving
            return rest[-1]

    assert asyncio.run(go()) == "data: [DONE]"
    assert served.call(driver.leases) == {}
    assert served.call(driver.replica_nodes, "chat") == ()
    with httpx.Client(base_url=served.url) as http:
        refused = http.post(COMPLETIONS, json=completion())
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    with pytest.raises(RequestError, match="no app 'chat' is served"):
        served.call(driver.remove, ["chat"])
