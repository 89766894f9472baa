"""Proxies between a client and Shoal: the answers are the same, and streams come as they are written."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import lesson
from tests.clients.catalogue import BASIC, CLIENTS
from tests.clients.environments import nginx, python_of
from tests.clients.recording import recorded
from tests.clients.served import APP, KEY, Ran, address_of, command_of, environment_of, run_program
from tests.clients.test_libraries import EXPECTED

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

START_TIMEOUT_S = 120.0
LONG_ANSWER = {
    "model": APP,
    "messages": [{"role": "user", "content": lesson.GREETING}],
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
}
NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    gzip on;
    gzip_types application/json text/event-stream;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://{host}:{upstream}; }}
    }}
}}
"""
"""As a site without knowledge of streams would write it: buffered, HTTP/1.0 to the gateway, compressed."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def process(command: list[str], url: str, folder: Path, environment: Any = None) -> Iterator[None]:
    """A server, from when its URL answers to the end of the block."""
    log = folder / "log"
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=folder, env=environment
        )
    try:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=5).status_code == 200:
                    break
            assert running.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.1)
        yield
    finally:
        running.terminate()
        running.wait(timeout=30)


@pytest.fixture(scope="module")
def behind_nginx(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    host, upstream = address_of(base_url)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, host=host, upstream=upstream))
    url = f"http://127.0.0.1:{port}/v1"
    with process([str(nginx()), "-p", str(folder), "-c", str(config)], f"{url}/models", folder):
        yield url


@pytest.fixture(scope="module")
def behind_litellm(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("litellm-proxy"), free_port()
    with recorded(*address_of(base_url), folder / "requests") as wire:
        behind = f"http://127.0.0.1:{wire.port}/v1"
        config = folder / "config.yaml"
        parameters = {"model": f"openai/{APP}", "api_base": behind, "api_key": KEY}
        config.write_text(
            json.dumps(
                {
                    "model_list": [{"model_name": APP, "litellm_params": parameters}],
                    "litellm_settings": {"num_retries": 0, "telemetry": False},
                    "general_settings": {"master_key": KEY},
                }
            )
        )
        litellm = python_of("litellm_proxy").with_name("litellm")
        command = [str(litellm), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with process(command, f"{url}/health/liveliness", folder, environment_of(behind, folder / "home")):
            yield f"{url}/v1"


@pytest.fixture(scope="module", params=["nginx", "litellm"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What OpenAI's own client brings through a proxy."""
    url: str = request.getfixturevalue(f"behind_{request.param}")
    client, folder = CLIENTS["openai-python"], tmp_path_factory.mktemp("through")
    return run_program(command_of(client, folder), url, folder)


@pytest.mark.parametrize("case", [*BASIC, "stream_helper", "streamed_tools", "named_tool"])
def test_answers_through_a_proxy_are_the_same(ran: Ran, case: str) -> None:
    assert ran.came(case) == EXPECTED[case]


def test_nginx_with_its_usual_settings_holds_no_stream_back(behind_nginx: str) -> None:
    times = []
    with httpx.stream("POST", f"{behind_nginx}/chat/completions", json=LONG_ANSWER, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for _ in answer.iter_raw():
            times.append(time.monotonic())
    assert len(times) > 20
    assert times[-1] - times[0] > 0.1
