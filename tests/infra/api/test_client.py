"""The client of the control API against what networks and services do: end, begin anew, redirect, hang."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError, RequestError, ShoalError
from cluster.files.storage import Storage
from infra.api import client, job_stream
from infra.api.access import digest_of, new_token
from infra.api.client import ApiClient, Endpoint, NoAnswerError, StreamEvent, UnavailableError
from infra.api.control import Control
from tests.certificates import make_certificate
from tests.served_api import RayJobs, control, served
from tests.train_jobs.ranks import tiny_job
from train_jobs.driver.submission import record_submission
from train_jobs.records.run_log import RunLog, now

JOB = "lm-20260101-000000-abcd"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    """One with a job that runs."""
    monkeypatch.setattr(job_stream, "LOOK_EVERY_S", 0.01)
    storage, jobs = Storage(tmp_path / "storage"), RayJobs()
    record_submission(storage, JOB, "lm", tiny_job(tmp_path / "c.parquet"), JOB)
    jobs.known[JOB] = "RUNNING"
    return control(storage, jobs)


@pytest.fixture
def token(lab: Control) -> str:
    made = new_token()
    lab.tokens.trust(digest_of(made))
    return made


def client_at(port: int, token: str, **more: Any) -> ApiClient:
    return ApiClient(Endpoint(f"http://127.0.0.1:{port}", token, own=True), **more)


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A service that gives each connection the next of these answers, and ends it; its port, and what it was
    asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def run() -> None:
            for answer in answers:
                with suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        asked.append(connection.recv(65536))
                        connection.sendall(answer)
            server.close()  # whoever comes now is refused

        threading.Thread(target=run, daemon=True).start()
        yield port, asked


def http(status: str, body: bytes, *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def test_a_stream_goes_on_over_the_end_and_a_new_beginning_of_its_service(
    lab: Control, token: str, tmp_path: Path
) -> None:
    log = RunLog(lab.storage.child("jobs", JOB))
    told: list[StreamEvent] = []
    with served(lab) as port:
        stream = client_at(port, token).stream(f"/jobs/{JOB}/stream")
        reader = threading.Thread(target=lambda: told.extend(stream), daemon=True)
        for step in range(1, 6):
            log.metric({"attempt": 1, "step": step, "loss": 1.0, "step_s": 0.1})
        assert log.wait(10.0)
        reader.start()
        time.sleep(0.5)
    for step in range(6, 11):  # nobody listens now
        log.metric({"attempt": 1, "step": step, "loss": 1.0, "step_s": 0.1})
    assert log.wait(10.0)
    with served(lab, port):
        time.sleep(0.5)
        log.event(now(), "finished", status="succeeded", step=10, exit_code=0)
        assert log.wait(10.0)
        reader.join(20.0)
        assert not reader.is_alive()
    assert [event.data["step"] for event in told if event.kind == "metric"] == list(range(1, 11))
    assert [event.data["kind"] for event in told if event.kind == "event"] == ["submitted", "finished"]
    assert told[-1].kind == "end"
    assert told[-1].data["status"] == "succeeded"


def test_where_it_was_cut_off_in_the_middle_of_an_event_that_comes_whole() -> None:
    kind = "Content-Type: text/event-stream"
    half = b'event: metric\nid: metric:1\ndata: {"step": 1}\n\nevent: metric\nid: metric:2\ndata: {"st'
    rest = b'event: metric\nid: metric:2\ndata: {"step": 2}\n\n: ping\n\nevent: end\ndata: {}\n\n'
    with answering(http("200 OK", half, kind), b"", http("200 OK", rest, kind)) as (port, asked):
        told = list(client_at(port, "t").stream("/jobs/x/stream"))
    assert [(event.kind, event.data) for event in told] == [
        ("metric", {"step": 1}),
        ("metric", {"step": 2}),
        ("end", {}),
    ]
    assert b"Last-Event-ID" not in asked[0].title()
    assert all(b"last-event-id: metric:1" in request.lower() for request in asked[1:])


def test_a_service_that_stays_away_is_given_up_and_one_that_is_hopeless_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(NoAnswerError, match="does not answer"):
        client_at(port, "t", patience_s=1.0).get("/jobs")
    assert 0.9 < time.monotonic() - began < 3.0
    began = time.monotonic()
    with pytest.raises(NoAnswerError, match="the cluster is down"):
        client_at(port, "t", hopeless=lambda: "the cluster is down").get("/jobs")
    assert time.monotonic() - began < 1.0
    with pytest.raises(NoAnswerError, match="does not answer: "):
        list(client_at(port, "t", patience_s=0.5).stream("/jobs/x/stream"))


def test_a_stream_that_has_begun_waits_longer_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "NOTED_AFTER_S", 0.4)
    kind = "Content-Type: text/event-stream"
    first = http("200 OK", b'event: metric\nid: metric:1\ndata: {"step": 1}\n\n', kind)
    away = http("503 x", b'{"error":{"kind":"cluster","message":"Ray is away","mistakes":[]}}')
    between = http("502 Bad Gateway", b"<html>")
    last = http("200 OK", b"event: end\ndata: {}\n\n", kind)
    with answering(first, away, between, last) as (port, _):
        told = list(client_at(port, "t", patience_s=0.1).stream("/jobs/x/stream"))
    assert [event.kind for event in told] == ["metric", "note", "end"]
    with answering(away) as (port, _), pytest.raises(ShoalError, match="Ray is away"):
        list(client_at(port, "t").stream("/jobs/x/stream"))
    with answering(first) as (port, _):
        stream = client_at(port, "t", patience_s=0.1, stream_patience_s=1.0).stream("/jobs/x/stream")
        with pytest.raises(NoAnswerError, match="does not answer any more"):
            list(stream)
    with answering(first) as (port, _):
        hopeless = client_at(port, "t", patience_s=0.1, hopeless=lambda: "the cluster is down")
        with pytest.raises(NoAnswerError, match="the cluster is down"):
            list(hopeless.stream("/jobs/x/stream"))


def test_what_changes_something_is_not_said_twice() -> None:
    with (
        answering(b"", http("200 OK", b"{}")) as (port, asked),
        pytest.raises(NoAnswerError, match="whether it was carried out"),
    ):
        client_at(port, "t").post("/jobs", {"name": "lm"})
    assert len(asked) == 1
    with answering(b"", http("200 OK", b"[]")) as (port, _):
        assert client_at(port, "t").get("/jobs") == []


def test_the_token_goes_nowhere_else() -> None:
    with answering(http("200 OK", b"[]")) as (other, stolen):
        moved = http("307 Temporary Redirect", b"", f"Location: http://127.0.0.1:{other}/api/v1/jobs")
        with answering(moved) as (port, _), pytest.raises(ShoalError, match="answered 307"):
            client_at(port, "secret").get("/jobs")
        assert stolen == []


def test_the_way_to_a_cluster_of_this_machine_leads_through_no_proxy(
    lab: Control, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with served(lab) as port:
        assert client_at(port, token).get("/version")["cluster"] == "lab"
        elsewhere = ApiClient(Endpoint(f"http://127.0.0.1:{port}", token), patience_s=0.0)
        with pytest.raises(NoAnswerError):
            elsewhere.get("/version")


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        ("404 Not Found", b"<html>nginx</html>", ShoalError, "answered 404, and not as a control API"),
        ("502 Bad Gateway", b"", UnavailableError, "answered 502, and not as a control API"),
        ("200 OK", b"<html>", ShoalError, "no control API of Shoal's"),
        ("400 Bad Request", b'{"error":{"kind":"request","message":"no"}}', ShoalError, "answered 400"),
        (
            "400 Bad Request",
            b'{"error":{"kind":"request","message":"no","mistakes":[]}}',
            RequestError,
            "^no$",
        ),
        ("503 x", b'{"error":{"kind":"cluster","message":"away","mistakes":[]}}', UnavailableError, "^away$"),
        (
            "422 x",
            b'{"error":{"kind":"config","message":"m","mistakes":[{"file":"f","line":null,"column":null,'
            b'"path":"a.b","given":1,"message":"is wrong"}]}}',
            ConfigError,
            "^f: a.b: is wrong$",
        ),
    ],
)
def test_what_goes_wrong_is_a_sentence(status: str, body: bytes, kind: type, said: str) -> None:
    with answering(http(status, body)) as (port, _), pytest.raises(ShoalError, match=said) as found:
        client_at(port, "t").get("/jobs")
    assert type(found.value) is kind


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate that is its own authority, for 127.0.0.1; and one for another name."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificate(folder, "good", "IP:127.0.0.1")
    make_certificate(folder, "other", "DNS:elsewhere.example")
    return {path.name: str(path) for path in folder.iterdir()}


def test_tls_is_checked(lab: Control, token: str, certificates: dict[str, str]) -> None:
    good, other = certificates["good.pem"], certificates["other.pem"]

    def version(port: int, authority: str | None, own: bool = False) -> Any:
        endpoint = Endpoint(f"https://127.0.0.1:{port}", token, authority, own=own)
        return ApiClient(endpoint, patience_s=0.0).get("/version")["cluster"]

    with served(lab, certificate=good, key=certificates["good.key"]) as port:
        assert version(port, good) == "lab"
        for authority in (None, other):
            with pytest.raises(NoAnswerError, match=r"cannot be trusted: .*certificate verify failed"):
                version(port, authority)
        with pytest.raises(NoAnswerError, match="cannot be trusted"):
            version(port, other, own=True)
        with pytest.raises(ShoalError):  # and without TLS nothing is said to it
            client_at(port, token, patience_s=0.0).get("/version")
    with served(lab, certificate=other, key=certificates["other.key"]) as port:
        with pytest.raises(NoAnswerError, match=r"cannot be trusted: .*IP address mismatch"):
            version(port, other)
        assert version(port, other, own=True) == "lab", "it is known by itself, not by its name"
