"""What is written down about clusters is read by other versions of Shoal, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.hosts.embedded import identity as identities
from cluster.hosts.embedded.identity import (
    IDENTITY_FILE,
    Identity,
    other_identities,
    read_identity,
    write_identity,
)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "state"
    root.mkdir(mode=0o700)
    monkeypatch.setattr(identities, "state_root", lambda: root)
    monkeypatch.setattr(identities, "state_directory", lambda name: root / name)


def written(name: str) -> Identity:
    identity = Identity(name, "1", "shoal.yaml", "127.1.2", "127.0.0.1", 8265, "127.0.0.1", 8100)
    identities.state_directory(name).mkdir(mode=0o700)
    write_identity(identity)
    return identity


def change(name: str, **fields: object) -> None:
    path = identities.state_directory(name) / IDENTITY_FILE
    document = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def test_a_newer_versions_cluster_does_not_stop_others_from_starting() -> None:
    mine, other = written("mine"), written("other")
    change("other", a_field_of_tomorrow={"a": 1})
    assert other_identities("mine") == [other]
    change("mine", a_field_of_tomorrow=1)
    assert read_identity("mine") == mine


def test_what_lacks_a_field_says_which_version_has_to_take_it_down() -> None:
    written("mine")
    change("mine", subnet=None)
    with pytest.raises(ShoalError, match="another version of Shoal"):
        read_identity("mine")
