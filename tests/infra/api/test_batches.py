"""Batches through the control API: what they tell arrives, and who is not listened to any more ends."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.files.storage import Storage
from infra.api import PREFIX, batches
from infra.api.access import digest_of, new_token
from infra.api.client import ApiClient, Endpoint
from infra.api.control import Control
from tests.served_api import RayJobs, control, served

PROCESS = """
import json, pathlib, signal, sys, time
asked = json.loads(sys.stdin.readline())
log = pathlib.Path(asked["request"]["output"] + ".log")
def write(word):
    with log.open("a") as file:
        file.write(word + "\\n")
def leave(*_):
    time.sleep(0.5)
    write("left")
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
write("begun")
def tell(kind, data):
    print(json.dumps({"kind": kind, "data": data}), flush=True)
print("what Ray has to say", flush=True)
print("[1, 2]", flush=True)
tell("note", {"text": "three of them"})
if asked["request"]["options"].get("die"):
    sys.exit(7)
if asked["request"]["options"].get("wait"):
    sys.stdin.read()
    leave()
tell("end", {"rows": 3, "config": asked["config"]["model"], "env": asked["env"]})
"""
"""Stands in for the process of a batch; it writes into a file beside its output what became of it."""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    monkeypatch.setattr(batches, "PROCESS", ("-c", PROCESS))
    return control(Storage(tmp_path / "storage"), RayJobs())


@pytest.fixture
def client(lab: Control) -> Iterator[ApiClient]:
    token = new_token()
    lab.tokens.trust(digest_of(token))
    with served(lab) as port:
        yield ApiClient(Endpoint(f"http://127.0.0.1:{port}", token, own=True))


@pytest.fixture
def body(tmp_path: Path) -> dict[str, Any]:
    """An app whose model is there, and where its answers go."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"model": str(model)}
    return {"config": config, "input": str(tmp_path / "in"), "output": str(tmp_path / "out"), "options": {}}


def written(body: dict[str, Any]) -> list[str]:
    log = Path(body["output"] + ".log")
    return log.read_text().split() if log.exists() else []


def wait_for(body: dict[str, Any], words: list[str]) -> None:
    deadline = time.monotonic() + 20
    while written(body) != words:
        assert time.monotonic() < deadline, written(body)
        threading.Event().wait(0.02)


def begin(client: ApiClient, body: dict[str, Any]) -> httpx.Response:
    """Begin a batch, and hear of it once."""
    request = httpx.Request(
        "POST",
        f"{client.endpoint.url}{PREFIX}/apps/chat/batch",
        json=body,
        headers={"Authorization": f"Bearer {client.endpoint.token}"},
    )
    answer = httpx.Client(trust_env=False).send(request, stream=True)
    assert answer.status_code == 200, answer.read()
    assert next(line for line in answer.iter_lines() if line.startswith("event")) == "event: note"
    return answer


def test_what_it_tells_arrives(client: ApiClient, body: dict[str, Any], lab: Control) -> None:
    told = list(client.stream("/apps/chat/batch", body=body))
    assert [(event.kind, event.data) for event in told] == [
        ("note", {"text": "three of them"}),
        ("end", {"rows": 3, "config": body["config"]["model"], "env": {}}),
    ]
    assert [line["outcome"] for line in lab.audit.newest(2)] == ["asked", "done"]


def test_one_that_nobody_listens_to_ends_and_the_next_one_waits_for_that(
    client: ApiClient, body: dict[str, Any]
) -> None:
    begin(client, {**body, "options": {"wait": True}}).close()
    told = list(client.stream("/apps/chat/batch", body=body))
    assert told[-1].kind == "end"
    assert written(body) == ["begun", "left", "begun"]


def test_one_whose_service_ends_ends_with_it(lab: Control, body: dict[str, Any]) -> None:
    token = new_token()
    lab.tokens.trust(digest_of(token))
    with served(lab) as port:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", token, own=True)
        answer = begin(ApiClient(endpoint), {**body, "options": {"wait": True}})
    answer.close()
    wait_for(body, ["begun", "left"])
    for child in psutil.Process().children():  # its loop, which waits for its children, is gone
        if child.status() == psutil.STATUS_ZOMBIE or "asked" in " ".join(child.cmdline()):
            os.waitpid(child.pid, 0)


def test_one_that_ends_without_a_word_is_told(client: ApiClient, body: dict[str, Any]) -> None:
    told = list(client.stream("/apps/chat/batch", body={**body, "options": {"die": True}}))
    assert told[-1].kind == "failed"
    assert told[-1].data == {"message": "the process of the batch ended with 7", "request": False}


def test_what_the_nodes_could_not_find_is_refused(client: ApiClient, body: dict[str, Any]) -> None:
    from cluster.errors import ConfigError, RequestError

    with pytest.raises(RequestError, match="input: should be a path from the root, or a URI, was 'in'"):
        list(client.stream("/apps/chat/batch", body={**body, "input": "in"}))
    with pytest.raises(ConfigError, match="does not exist"):
        list(client.stream("/apps/chat/batch", body={**body, "config": {"model": "/no/such/model"}}))
    assert written(body) == []
