"""Tokens: what they open, what is kept of them, and what is left when their file is damaged."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.state.record import ClusterRecord
from infra.api.access import digest_of, new_token, own_token
from infra.api.roles import ApiCaller
from infra.api.tokens import FILE, UP, TokenTable


@pytest.fixture
def kept(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "control")


def test_a_token_opens_for_its_role_after_a_restart_too(kept: Storage) -> None:
    token = TokenTable(kept).make("ann", "run", "up")
    assert TokenTable(kept).caller_of(token) == ApiCaller("ann", "run")
    assert TokenTable(kept).caller_of(token[:-1]) is None
    assert TokenTable(kept).caller_of("") is None


def test_the_clusters_own_token_is_the_same_when_the_cluster_has_come_back_as_another(tmp_path: Path) -> None:
    def record(cluster_id: str, token: Path | None, name: str = "lab") -> ClusterRecord:
        return ClusterRecord(
            name, cluster_id, "", "", "", "", "", "", "", 0, None if token is None else str(token)
        )

    rays, others = tmp_path / "rays", tmp_path / "others"
    rays.write_text("ab" * 32)
    others.write_text("cd" * 32)
    own = own_token(record("1", rays))
    assert own == own_token(record("2", rays))
    assert own != own_token(record("1", others))
    assert own != own_token(record("1", rays, "another"))
    # Without a token of Ray's the id is what nobody else knows.
    assert own_token(record("1", None)) != own_token(record("2", None))


def test_digests_are_kept_and_no_token(kept: Storage) -> None:
    token = TokenTable(kept).make("ann", "run", "up")
    text = kept.read_bytes(FILE).decode()
    assert token not in text
    assert digest_of(token) in text
    (entry,) = TokenTable(kept).entries()
    assert set(entry.as_json()) == {"name", "role", "created_at", "created_by", "expires_at"}


def test_one_that_has_expired_or_was_revoked_opens_nothing(kept: Storage) -> None:
    table = TokenTable(kept)
    token = table.make("ann", "run", "up", datetime.now(UTC) + timedelta(hours=1))
    assert table.caller_of(token) is not None
    (row,) = json.loads(kept.read_bytes(FILE))
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    kept.write_bytes(FILE, json.dumps([{**row, "expires_at": past}]).encode())
    assert TokenTable(kept).caller_of(token) is None
    other = table.make("bob", "read", "ann")
    table.revoke("bob")
    assert table.caller_of(other) is None
    assert TokenTable(kept).caller_of(other) is None


@pytest.mark.parametrize("name", ["", "a b", "-x", "ü", "a" * 64, UP, "a\n"])
def test_a_name_that_could_be_misread_is_refused(name: str, kept: Storage) -> None:
    with pytest.raises(RequestError, match="cannot be the name of a token"):
        TokenTable(kept).make(name, "read", "up")
    assert TokenTable(kept).entries() == []


def test_a_name_is_one_persons(kept: Storage) -> None:
    table = TokenTable(kept)
    table.make("ann", "read", "up")
    with pytest.raises(RequestError, match="there is a token 'ann' already"):
        table.make("ann", "admin", "up")
    with pytest.raises(RequestError, match="there is no token 'bob'; there are: ann"):
        table.revoke("bob")
    with pytest.raises(RequestError, match="would have expired"):
        table.make("bob", "read", "up", datetime.now(UTC) - timedelta(days=1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{}x",
        '[{"name": "a"}]',
        '[{"name":"a","role":"root","sha256":"","created_at":"","created_by":""}]',
    ],
)
def test_with_a_damaged_file_only_who_brought_the_cluster_up_comes_in(text: str, kept: Storage) -> None:
    kept.write_bytes(FILE, text.encode())
    table, own = TokenTable(kept), new_token()
    table.trust(digest_of(own))
    assert table.caller_of(own) == ApiCaller(UP, "admin")
    with pytest.raises(ShoalError, match="is damaged"):
        table.caller_of(new_token())
    with pytest.raises(ShoalError, match="is damaged"):
        table.make("ann", "read", "up")
    assert kept.read_bytes(FILE) == text.encode(), "what is damaged is mended by a person, not lost"
