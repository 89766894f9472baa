"""Serve makes configs in one thread at a time: it pickles them by way of a table of the whole process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from serve_apps.controller import applications
from tests.serve_apps.controller.world import spec_of


def test_apps_are_started_and_looked_at_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []

    def alone(*_: Any, **__: Any) -> Any:
        inside.append("here")
        time.sleep(0.02)
        assert inside == ["here"]
        inside.clear()
        return SimpleNamespace(applications={})

    monkeypatch.setattr(applications, "application", alone)
    for name in ("RunTarget", "run_many", "status"):
        monkeypatch.setattr(serve, name, alone)
    failed: list[BaseException] = []

    def often(what: Any, *arguments: Any) -> None:
        try:
            for _ in range(5):
                what(*arguments)
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=often, args=(applications.look,)) for _ in range(2)]
    threads += [threading.Thread(target=often, args=(applications.start, spec_of(1), "chat:1", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
