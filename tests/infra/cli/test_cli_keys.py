"""`shoal key`, and what `shoal validate` says of keys."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from cluster.config.reading.api_keys import load_keys
from tests.clusters import shoal, write_config


def config(directory: Path, keys: str = "keys.yaml", *more: str) -> str:
    gateway = ", ".join([f"keys: {keys}", *more])
    return str(write_config(directory, "k", "storage: ./storage", f"gateway: {{{gateway}}}"))


def test_a_new_key_is_shown_once_and_opens_what_it_was_made_for(tmp_path: Path) -> None:
    path = config(tmp_path)
    (tmp_path / "keys.yaml").write_text("# ours\n")
    first = shoal("key", "research", "-f", path)
    assert first.returncode == 0, first.stderr
    options = (
        "--app",
        "chat",
        "--app",
        "code",
        "--requests-per-minute",
        "5",
        "--tokens-per-minute",
        "100",
        "--metrics",
    )
    second = shoal("key", "web", *options, "--json", "-f", path)
    assert second.returncode == 0, second.stderr
    keys = load_keys(str(tmp_path / "keys.yaml"))
    own, other = (
        keys.find(f"Bearer {first.stdout.strip()}"),
        keys.find(f"Bearer {json.loads(second.stdout)['key']}"),
    )
    assert own is not None
    assert (own.tenant, own.apps, own.requests_per_minute) == ("research", None, None)
    assert other is not None
    assert (other.tenant, other.apps) == ("web", ("chat", "code"))
    assert (own.metrics, other.metrics) == (False, True)
    assert (other.requests_per_minute, other.tokens_per_minute) == (5, 100)
    text = (tmp_path / "keys.yaml").read_text()
    assert text.startswith("# ours\n")
    assert first.stdout.strip() not in text
    assert stat.S_IMODE((tmp_path / "keys.yaml").stat().st_mode) == 0o600
    assert shoal("validate", "-f", path).returncode == 0


def test_a_list_in_json_stays_one(tmp_path: Path) -> None:
    path = config(tmp_path, "keys.json")
    (tmp_path / "keys.json").write_text("[]")
    for tenant in ("a", "b"):
        assert shoal("key", tenant, "-f", path).returncode == 0
    assert [entry["tenant"] for entry in json.loads((tmp_path / "keys.json").read_text())] == ["a", "b"]


def test_where_no_key_can_be_added_it_says_why(tmp_path: Path) -> None:
    nowhere = str(write_config(tmp_path / "none", "k", "storage: ./storage"))
    broken = config(tmp_path / "broken")
    (tmp_path / "broken" / "keys.yaml").write_text("tenant: one")
    for path, says in (
        (nowhere, "names no file"),
        (config(tmp_path / "env", "'env:K'"), "names no file"),
        (broken, "list"),
    ):
        done = shoal("key", "a", "-f", path)
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    assert (tmp_path / "broken" / "keys.yaml").read_text() == "tenant: one"


@pytest.mark.parametrize(
    ("gateway", "column", "says"),
    [
        ("{host: 0.0.0.0}", "host", "should be a loopback address unless gateway.keys names API keys"),
        ("{host: example.org}", "host", "should be a loopback address"),
        ("{keys: nowhere.yaml}", "keys", "nowhere.yaml cannot be read: No such file"),
        ("{keys: shoal.yaml}", "keys", "shoal.yaml"),
        ("{keys: 'env:NO_SUCH_VARIABLE'}", "keys", "the environment has no variable NO_SUCH_VARIABLE"),
    ],
)
def test_a_gateway_that_anyone_could_reach_or_nobody_open_is_refused(
    gateway: str, column: str, says: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, "k", "storage: ./storage", f"gateway: {gateway}")
    done = shoal("validate", "--json", "-f", str(path))
    assert done.returncode == 2
    (error,) = json.loads(done.stdout)["errors"]
    assert error["path"] == f"cluster.gateway.{column}"
    assert says in error["message"]


def test_a_gateway_with_keys_may_listen_anywhere(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("")
    for host in ("0.0.0.0", "127.0.0.1", "localhost"):
        assert shoal("validate", "-f", config(tmp_path, "keys.yaml", f"host: {host}")).returncode == 0
