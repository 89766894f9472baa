"""The real HAProxy with our configuration, before a real gateway, for clients that are slow or many."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ShoalError
from cluster.hosts.endpoints import free_port
from serve_apps.front.haproxy import Haproxy
from serve_apps.front.haproxy_config import FrontSettings, answer_file, haproxy_config, own_answers
from serve_apps.front.slots import Slots
from tests.certificates import make_certificate
from tests.serve_apps.fronted_gateway import SECRET, front
from tests.serve_apps.gateway_process import HOST, RunningGateway, running_gateway

PATH = "/v1/completions"
BODY = {"model": "chat", "prompt": "a b", "max_tokens": 3}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    options = {"front_secret": SECRET, "metrics_from": []}
    limits = {"queue": 100, "batch": 100, "body_bytes": 10_000_000}
    with running_gateway(tmp_path_factory.mktemp("gateway"), gateway=options, limits=limits) as gateway:
        yield gateway


def connect(url: str) -> socket.socket:
    client = socket.create_connection((HOST, httpx.URL(url).port or 0), timeout=20)
    client.settimeout(20)
    return client


def all_of(client: socket.socket) -> bytes:
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    return received


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


def test_who_asks_is_who_the_front_says(gateway: RunningGateway) -> None:
    with front(gateway) as url:
        headers = {"x-forwarded-for": "10.1.2.3", "x-shoal-front": "guess", "x-shoal-front-sent": "soon"}
        given = {**headers, "x-request-id": "mine"}
        answer = httpx.post(f"{url}{PATH}", json=BODY, headers=given, timeout=20)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        assert httpx.post(f"{gateway.url}{PATH}", json=BODY, headers=headers, timeout=20).status_code == 403


def test_slow_heads_and_bodies_are_ended_and_reach_no_gateway(gateway: RunningGateway) -> None:
    with front(gateway, request_s=1.0) as url:
        with connect(url) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            assert all_of(client).startswith(b"HTTP/1.1 408 ")  # in words that cannot be chosen
        before = gateway.process.num_fds()
        with connect(url) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 1000\r\n\r\n{"
            )
            time.sleep(0.5)
            assert gateway.process.num_fds() <= before + 1, "a body that is not there yet takes no gateway"
            assert error_of(all_of(client)) == (408, "request_timeout")


def test_a_client_that_waits_for_its_answer_is_not_let_go(gateway: RunningGateway) -> None:
    with front(gateway, stalled_s=1.0) as url:
        slow = {**BODY, "prompt": "every:1.2", "max_tokens": 2}
        assert httpx.post(f"{url}{PATH}", json=slow, timeout=20).status_code == 200


def test_a_large_body_arrives_whole(gateway: RunningGateway) -> None:
    with front(gateway) as url:
        large = {**BODY, "user": "u" * 1_000_000}
        answer = httpx.post(f"{url}{PATH}", json=large, timeout=20)
        assert answer.status_code == 200, answer.text
        too_large = httpx.post(f"{url}{PATH}", json={**BODY, "user": "u" * 11_000_000}, timeout=20)
        assert too_large.status_code == 413


def test_one_address_has_so_many_connections_and_requests_and_no_more(gateway: RunningGateway) -> None:
    with front(gateway, address_requests=5, address_connections=3) as url:
        statuses = [httpx.get(f"{url}/health", timeout=20) for _ in range(8)]
        assert [answer.status_code for answer in statuses] == [200] * 5 + [429] * 3
        assert statuses[-1].headers["retry-after"] == "10"
        assert statuses[-1].json()["error"]["code"] == "rate_limit_exceeded"
    with front(gateway, address_connections=3) as url:
        held = [connect(url) for _ in range(3)]
        refused = httpx.get(f"{url}/health", timeout=20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        for client in held:
            client.close()
        time.sleep(0.2)
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200


def test_its_figures_are_for_who_may_read_them(gateway: RunningGateway) -> None:
    with front(gateway) as url:
        figures = httpx.get(f"{url}/metrics/front", timeout=20)
        assert "haproxy_frontend_http_requests_total" in figures.text
        assert 'server="g0"' in figures.text
    for allowed, status in (((), 404), (("192.0.2.0/24", "192.0.2.7"), 404), (("127.0.0.0/8",), 200)):
        with front(gateway, metrics_from=allowed) as url:
            assert httpx.get(f"{url}/metrics/front", timeout=20).status_code == status


@pytest.mark.slow
def test_without_a_gateway_clients_are_told_to_try_again(tmp_path: Path) -> None:
    with running_gateway(tmp_path, gateway={"front_secret": SECRET}) as gateway, front(gateway) as url:
        gateway.process.suspend()
        answers = list[httpx.Response]()
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}{PATH}", json=BODY, timeout=20))
        )
        asking.start()
        time.sleep(0.3)
        gateway.process.resume()
        asking.join()
        assert answers[0].status_code == 200
        port = free_port(HOST)
        moved = RunningGateway(gateway.process, port, gateway.log_path)
        with front(moved, absent_s=1.0) as nowhere:
            refused = httpx.post(f"{nowhere}{PATH}", json=BODY, timeout=20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_gateway")
        assert refused.headers["retry-after"] == "1"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_tls_with_http_2(gateway: RunningGateway, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "front", f"IP:{HOST}")
    Path(f"{certificate}.key").write_bytes(Path(key).read_bytes())
    with front(gateway, certificate=certificate) as url:
        asked = ["-H", "content-type: application/json", "-d", json.dumps({**BODY, "stream": True})]
        told = ["-w", "\n%{http_version} %{http_code}"]
        done = subprocess.run(
            ["curl", "-s", "--http2", "--cacert", certificate, *told, *asked, f"{url}{PATH}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "2 200"
        assert "data: [DONE]" in done.stdout
        context = ssl.create_default_context(cafile=certificate)
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.minimum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, OSError)), connect(url) as plain:
            context.wrap_socket(plain, server_hostname=HOST)


@pytest.mark.slow
def test_a_certificate_that_changed_is_shown_while_it_runs(gateway: RunningGateway, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "front", f"IP:{HOST}")
    Path(f"{certificate}.key").write_bytes(Path(key).read_bytes())
    port, haproxy, slots = free_port(HOST), Haproxy(), Slots(2)
    slots.change([gateway.url])
    chosen = FrontSettings(HOST, port, SECRET, connections=100, certificate=certificate)
    config = haproxy_config(chosen, slots.servers(), str(haproxy.directory))
    try:
        haproxy.go_by(config)
        first = ssl.get_server_certificate((HOST, port))
        other, other_key = make_certificate(tmp_path, "other", f"IP:{HOST}")
        Path(certificate).write_bytes(Path(other).read_bytes())
        Path(f"{certificate}.key").write_bytes(Path(other_key).read_bytes())
        haproxy.go_by(config)
        deadline = time.monotonic() + 10
        while (shown := ssl.get_server_certificate((HOST, port))) == first:
            assert time.monotonic() < deadline
        assert shown == ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(Path(other).read_text()))
    finally:
        haproxy.end()


def test_it_ends_with_the_process_that_started_it() -> None:
    program = (
        "import time\n"
        "from serve_apps.front.haproxy import Haproxy\n"
        "from serve_apps.front.haproxy_config import FrontSettings, haproxy_config\n"
        "from serve_apps.front.slots import Slots\n"
        "haproxy = Haproxy()\n"
        f"settings = FrontSettings({HOST!r}, {free_port(HOST)}, 's', connections=100)\n"
        "haproxy.go_by(haproxy_config(settings, Slots(2).servers(), str(haproxy.directory)))\n"
        "print(haproxy.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    master = psutil.Process(int(process.stdout.readline()))
    family = [master, *master.children()]
    assert len(family) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def test_a_port_that_another_has_is_said() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        haproxy = Haproxy()
        chosen = FrontSettings(HOST, taken.getsockname()[1], SECRET, connections=100)
        with pytest.raises(ShoalError, match="cannot bind socket"):
            haproxy.go_by(haproxy_config(chosen, Slots(2).servers(), str(haproxy.directory)))
        haproxy.end()


hosts = st.sampled_from(["", "0.0.0.0", "127.0.0.1", "::", "::1"])
numbers = st.none() | st.integers(1, 10**6)


@settings(max_examples=30, deadline=None)
@given(hosts, st.integers(1, 65535), numbers, numbers, st.integers(1, 300))
def test_haproxy_takes_what_the_config_can_say(
    host: str, port: int, connections: int | None, requests: int | None, slots: int
) -> None:
    haproxy = Haproxy()
    chosen = FrontSettings(
        host, port, SECRET, connections=100, address_connections=connections, address_requests=requests
    )
    config = haproxy_config(chosen, Slots(slots).servers(), str(haproxy.directory))
    for status, answer in own_answers().items():
        (haproxy.directory / answer_file(status)).write_bytes(answer)
    path = haproxy.directory / "haproxy.cfg"
    path.write_text(config)
    checked = haproxy._run("-c", "-f", str(path))
    haproxy.end()
    assert checked.returncode == 0, checked.stderr.decode()
    assert b"WARNING" not in checked.stderr, checked.stderr.decode()


def test_what_runs_is_answered_when_it_is_ended(gateway: RunningGateway) -> None:
    port, haproxy, slots = free_port(HOST), Haproxy(), Slots(2)
    slots.change([gateway.url])
    chosen = FrontSettings(HOST, port, SECRET, connections=100)
    haproxy.go_by(haproxy_config(chosen, slots.servers(), str(haproxy.directory)))
    url, slow = f"http://{HOST}:{port}", {**BODY, "prompt": "every:0.4", "stream": True}
    with httpx.Client(base_url=url, timeout=20) as idle, ThreadPoolExecutor(1) as pool:
        assert idle.get("/health").status_code == 200
        asking = pool.submit(httpx.post, url + PATH, json=slow, timeout=20)
        gateway.wait_for(lambda state: state["running"] == 1)
        haproxy.end()
        assert "data: [DONE]" in asking.result().text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=20)
