"""The audit log: what was asked for stands there before it is done, and then what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from infra.api import audit
from infra.api.audit import AuditLog
from infra.api.roles import ApiCaller

ANN = ApiCaller("ann", "run")


def outcomes(log: AuditLog) -> list[tuple[str, str | None]]:
    return [(line["outcome"], line["reason"]) for line in log.newest(100)]


def test_a_change_has_two_lines_the_first_before_it_is_made(tmp_path: Path) -> None:
    log = AuditLog(Storage(tmp_path / "control"))
    with log.change(ANN, "10.0.0.7", "stop_job", "lm") as change:
        (line,) = (tmp_path / "control" / "audit.jsonl").read_text().splitlines()
        assert '"outcome": "asked"' in line
        change.result = "lm-1"
    first, last = log.newest(10)
    assert (first["id"], first["who"], first["role"], first["address"]) == (
        last["id"],
        "ann",
        "run",
        "10.0.0.7",
    )
    assert (first["operation"], first["target"]) == ("stop_job", "lm")
    assert (first["result"], last["result"]) == (None, "lm-1")
    assert outcomes(log) == [("asked", None), ("done", None)]


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (RequestError("no such job"), "refused", "no such job"),
        (ShoalError("Ray is away"), "failed", "ShoalError: Ray is away"),
        (KeyError("a bug"), "failed", "KeyError: 'a bug'"),
    ],
)
def test_what_came_of_it_is_told(error: Exception, outcome: str, reason: str, tmp_path: Path) -> None:
    log = AuditLog(Storage(tmp_path))
    with pytest.raises(type(error)), log.change(ANN, "", "stop_job", "lm"):
        raise error
    assert outcomes(log) == [("asked", None), (outcome, reason)]


def test_what_cannot_be_noted_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WRITE_TIMEOUT_S", 10.0)
    (tmp_path / "storage").write_text("a file where the directory should be")
    log = AuditLog(Storage(tmp_path / "storage" / "control"))
    done = False
    with (
        pytest.raises(ShoalError, match=r"nothing was changed: the audit log in .* cannot be written"),
        log.change(ANN, "", "stop_job", "lm"),
    ):
        done = True
    assert not done
    (tmp_path / "storage").unlink()  # the storage is back
    with log.change(ANN, "", "stop_job", "other"):
        done = True
    assert done
    assert [line["target"] for line in log.newest(100)] == ["lm", "lm", "other", "other"]
    assert [outcome for outcome, _ in outcomes(log)] == ["asked", "failed", "asked", "done"]
