"""Serve makes configs in one thread at a time: it pickles them by way of a table of the whole process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from serve_apps.controller import serve_application, serve_state
from serve_apps.replica.serve_private import ServeInstance
from tests.serve_apps.controller.world import spec_of

FRAMES = "".join(f'  File "replica.py", line {line}, in start\n    await start()\n' for line in range(40))

TRACE = f"Traceback (most recent call last):\n{FRAMES}"


def told_by_serve(error: str) -> SimpleNamespace:
    """What Serve says where a replica's constructor raised."""
    message = f"ray::ServeReplica:chat:5.initialize() (pid=1)\n{FRAMES}RuntimeError: {TRACE}{error}\n"
    return SimpleNamespace(message="", status=None, deployments={"d": SimpleNamespace(message=message)})


def test_an_error_of_our_own_is_the_whole_reason() -> None:
    ours = "the model does not fit; it needs:\n1000.0 GiB"
    assert serve_state.reason(told_by_serve(f"serve_apps.engine.protocol.EngineError: {ours}")) == ours
    nested = f"cluster.errors.ShoalError: a cause\n\nThe above was the direct cause of:\n{TRACE}"
    assert serve_state.reason(told_by_serve(f"{nested}cluster.storage.StorageError: {ours}")) == ours


@pytest.mark.parametrize("before", ["", "cluster.errors.ShoalError: a cause\n\nThen another occurred:\n"])
def test_of_another_error_the_end_of_the_traceback_is_the_reason(before: str) -> None:
    told = told_by_serve(f"{before}{TRACE if before else ''}ValueError: no such layer")
    lines = serve_state.reason(told).splitlines()
    assert lines[-1] == "ValueError: no such layer"
    assert len(lines) == serve_state.LINES


def test_apps_are_started_and_looked_at_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []

    def alone(*_: Any, **__: Any) -> Any:
        inside.append("here")
        time.sleep(0.02)
        assert inside == ["here"]
        inside.clear()
        return SimpleNamespace(applications={}, proxies={})

    monkeypatch.setattr(serve_application, "application", alone)
    for module in (serve_application, serve_state):
        monkeypatch.setattr(module, "find_serve", lambda: ServeInstance("serve-1", "127.0.0.1", 8000))
    for name in ("RunTarget", "run_many", "status"):
        monkeypatch.setattr(serve, name, alone)
    failed: list[BaseException] = []

    def often(what: Any, *arguments: Any) -> None:
        try:
            for _ in range(5):
                what(*arguments)
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=often, args=(serve_state.look,)) for _ in range(2)]
    threads += [threading.Thread(target=often, args=(serve_application.start, spec_of(1), "chat:1", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
