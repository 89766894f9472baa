"""Apps that are served again when their nodes come back: what fails for want of room is tried again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cluster.errors import RequestError, ShoalError
from cluster.sharing import client
from cluster.state.connection import ClusterRecord
from infra import tenants
from infra.tenant_book import TenantBook
from tests.serve_apps.controller.world import spec_of


class Site:
    """A cluster whose nodes come back one after another; its clock goes on where somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tries: int) -> None:
        self.now = 0.0
        self.tries_left = tries
        self.deployed: list[tuple[float, list[str]]] = []
        self.said: list[str] = []
        self.book = TenantBook(tmp_path / "tenants")
        self.book.keep_apps([spec_of(1).as_json()])
        self.record = MagicMock(spec=ClusterRecord)
        monkeypatch.setattr(tenants, "connect", lambda record: None)
        monkeypatch.setattr(tenants, "disconnect", lambda: None)
        monkeypatch.setattr(tenants, "_resume_jobs", lambda record, book, say: [])
        monkeypatch.setattr(tenants, "start_serve", lambda info, deadline, say: None)
        monkeypatch.setattr(tenants, "deploy_specs", self.deploy)
        monkeypatch.setattr(client, "BrokerClient", MagicMock())
        monkeypatch.setattr(tenants, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def deploy(self, specs: Any, deadline: float, say: tenants.Say) -> None:
        self.deployed.append((self.now, [spec.name for spec in specs]))
        self.now += 3
        self.tries_left -= 1
        if self.tries_left > 0:
            raise RequestError("chat needs 2 devices, and 1 is there")

    def come_back(self) -> None:
        tenants.come_back(self.record, self.book, self.said.append)


def test_apps_that_find_no_room_yet_are_tried_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(monkeypatch, tmp_path, tries=3)
    site.come_back()
    starts = [start for start, _ in site.deployed]
    assert starts == [0, 3 + tenants.RETRY_S, 2 * (3 + tenants.RETRY_S)]
    assert site.said[1:] == ["chat needs 2 devices, and 1 is there; it is tried again"] * 2


def test_apps_that_never_find_room_are_given_up_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(monkeypatch, tmp_path, tries=10**6)
    with pytest.raises(ShoalError, match=r"^chat needs 2 devices, and 1 is there$"):
        site.come_back()
    assert tenants.READY_S < site.now < tenants.READY_S + 2 * tenants.RETRY_S
    assert site.book.apps(), "the next that come back serve them"
