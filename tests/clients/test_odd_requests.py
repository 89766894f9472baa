"""What curl and the JDK's client do that others do not: other protocols, bodies in chunks, waits, HEAD."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients import lesson
from tests.clients.served import APP, KEY, PROGRAMS, run_program

pytestmark = pytest.mark.clients

CHAT = {"model": APP, "messages": [{"role": "user", "content": lesson.GREETING}], "temperature": 0}
STREAM = {**CHAT, "stream": True}
LARGE = {**CHAT, "messages": [{"role": "system", "content": "wort " * 10_000}, *CHAT["messages"]]}
AS_JSON = ("-H", "Content-Type: application/json")


def curl(*arguments: str, body: Any = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["curl", "--silent", "--show-error", "--max-time", "60", *arguments],
        input=None if body is None else json.dumps(body),
        capture_output=True,
        text=True,
        timeout=90,
    )


def content(document: str) -> str:
    text: str = json.loads(document)["choices"][0]["message"]["content"]
    return text


def joined(lines: list[str]) -> str:
    """The text of a stream's events; the stream must say that it is whole."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    "options",
    [
        ("--http1.1",),
        ("--http1.0",),
        ("--http2",),
        ("--compressed",),
        ("-H", "Expect: 100-continue"),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue"),
        ("-H", "Connection: close"),
        ("-H", "Accept: text/plain"),
        ("-H", f"api-key: {KEY}"),
    ],
    ids=lambda options: " ".join(options),
)
def test_answers_and_streams_come_whatever_curl_is_told(base_url: str, options: tuple[str, ...]) -> None:
    post = (*options, *AS_JSON, "--data-binary", "@-", f"{base_url}/chat/completions")
    for body in (CHAT, LARGE):
        done = curl(*post, body=body)
        assert done.returncode == 0, done.stderr
        assert content(done.stdout) == lesson.GREETED
    done = curl("--no-buffer", *post, body=STREAM)
    assert done.returncode == 0, done.stderr
    assert joined(done.stdout.splitlines()) == lesson.GREETED


def test_a_client_that_speaks_only_http2_is_answered(base_url: str) -> None:
    """By the front, without TLS too."""
    shown = ("--write-out", "\n%{http_version}")
    done = curl("--fail", "--http2-prior-knowledge", "--max-time", "10", *shown, f"{base_url}/models")
    assert done.returncode == 0, done.stderr
    models, version = done.stdout.splitlines()
    assert [model["id"] for model in json.loads(models)["data"]] == ["fish"]
    assert version == "2"


def test_head_has_the_headers_of_get_and_no_body(base_url: str) -> None:
    done = curl("--head", f"{base_url}/models")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("HTTP/1.1 200")
    length = [line for line in done.stdout.splitlines() if line.lower().startswith("content-length:")]
    size = curl("--output", "/dev/null", "--write-out", "%{size_download}", f"{base_url}/models").stdout
    assert int(length[0].split(":")[1]) == int(size)


def test_a_body_without_a_type_is_refused_in_words(base_url: str) -> None:
    """What curl sends is a form then."""
    done = curl("--data-binary", "@-", f"{base_url}/chat/completions", body=CHAT)
    assert done.returncode == 0, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "unsupported_media_type"
    assert "Content-Type: application/json" in error["message"]


def test_two_requests_share_a_connection(base_url: str) -> None:
    done = curl("--write-out", "%{num_connects}\n", f"{base_url}/models", f"{base_url}/models")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("0")


@pytest.mark.parametrize("version", ["HTTP_2", "HTTP_1_1"])
def test_the_jdks_client_gets_answers_and_streams(base_url: str, version: str, tmp_path: Path) -> None:
    java = ["java", "-Dfile.encoding=UTF-8", str(PROGRAMS / "Client.java")]
    ran = run_program([*java, json.dumps(CHAT), json.dumps(STREAM)], base_url, tmp_path)
    status, body = ran.came(f"chat_{version}")
    assert (status, content(body)) == (200, lesson.GREETED)
    status, *lines = ran.came(f"stream_{version}")
    assert (status, joined(lines)) == (200, lesson.GREETED)
