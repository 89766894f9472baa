"""The one gateway of a cluster dies: until another is there, those who ask wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from cluster.hosts.endpoints import free_port
from serve_apps.front.haproxy import Haproxy
from serve_apps.front.haproxy_config import FrontSettings, haproxy_config
from serve_apps.front.slots import Slots
from tests.serve_apps.front.small_gateway import GATEWAY, until_it_answers

HOST = "127.0.0.1"
AWAY_S = 4.0


@contextmanager
def gateway(after_s: float) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that answers with "here" after so many seconds; and its URL."""
    port = free_port(HOST)
    command = [sys.executable, "-c", GATEWAY, HOST, str(port), "here", str(after_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            until_it_answers(url := f"http://{HOST}:{port}")
            yield process, url
        finally:
            process.kill()


@contextmanager
def front(slots: Slots, **changes: float) -> Iterator[tuple[Haproxy, str]]:
    port, haproxy = free_port(HOST), Haproxy()
    settings = FrontSettings(HOST, port, "secret", connections=200, **changes)  # type: ignore[arg-type]
    try:
        haproxy.go_by(haproxy_config(settings, slots.servers(), str(haproxy.directory)))
        yield haproxy, f"http://{HOST}:{port}/v1/completions"
    finally:
        haproxy.end()


def ask(url: str) -> tuple[int, str]:
    answer = httpx.post(url, json={}, timeout=30, trust_env=False)
    return answer.status_code, answer.text


def ask_again(url: str) -> tuple[int, str]:
    """The same on a connection on which something was asked and answered before."""
    with httpx.Client(timeout=30, trust_env=False) as client:
        assert client.post(url, json={"at_once": True}).status_code == 200
        answer = client.post(url, json={})
        return answer.status_code, answer.text


@pytest.mark.slow
def test_those_who_ask_meanwhile_wait_and_so_do_those_whose_answer_had_not_begun() -> None:
    slots = Slots(3)
    with gateway(60.0) as (lost, url), gateway(0.0) as (_, other), ThreadPoolExecutor(40) as clients:
        slots.change([url])
        with front(slots) as (haproxy, public):
            before = [clients.submit(how, public) for how in (ask, ask_again) * 4]
            assert lost.stdout is not None
            for _ in range(len(before) + 4):
                assert lost.stdout.readline() == b"asked\n"
            threading.Event().wait(0.2)
            lost.kill()
            began = time.monotonic()
            meanwhile = []
            while time.monotonic() - began < AWAY_S:
                meanwhile.append(clients.submit(ask, public))
                threading.Event().wait(AWAY_S / 20)
            assert not any(each.done() for each in [*before, *meanwhile])
            haproxy.tell(slots.change([other]))
            answers = [each.result() for each in [*before, *meanwhile]]
            print(f"all were answered {time.monotonic() - began - AWAY_S:.1f} s after the next was there")
            assert answers == [(200, "here")] * len(answers)


@pytest.mark.parametrize("absent_s", [3.0, pytest.param(6.0, marks=pytest.mark.slow)])
def test_they_do_not_wait_for_ever(absent_s: float) -> None:
    with front(Slots(3), absent_s=absent_s) as (_, public):
        began = time.monotonic()
        status, text = ask(public)
        assert (status, "no_gateway" in text) == (503, True)
        assert absent_s - 0.5 <= time.monotonic() - began < absent_s + 3
