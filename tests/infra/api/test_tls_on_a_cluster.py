"""The control API of a cluster with a certificate of its own, from here and from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.state.state_directory import state_directory
from tests.certificates import make_certificate
from tests.clusters import shoal, started, unique_name, write_config

pytestmark = pytest.mark.slow

ONE_NODE = "nodes: [{name: head, cpus: 1}]"


def test_it_is_https_and_checked(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path, "good", "DNS:localhost")
    api = "api: {certificate: good.pem, private_key: good.key}"
    with started(tmp_path, ONE_NODE, api) as cluster:
        assert cluster.record.api_url.startswith("https://")
        assert cluster.shoal("status").returncode == 0, "its name is another, and it is known all the same"
        token = tmp_path / "token"
        token.write_text(cluster.shoal("token", "ann", "--role", "read").stdout)
        connect = ("connect", cluster.record.api_url, "--token-file", str(token))
        elsewhere = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
        refused = shoal(*connect, **elsewhere)
        assert (refused.returncode, "cannot be trusted" in refused.stderr) == (1, True)
        refused = shoal(*connect, "--certificate-authority", certificate, **elsewhere)
        assert (refused.returncode, "IP address mismatch" in refused.stderr) == (1, True)
        by_http = shoal("connect", cluster.record.api_url.replace("https", "http"), *connect[2:], **elsewhere)
        assert by_http.returncode == 1


@pytest.mark.parametrize("broken", ["missing", "another's key", "text"])
def test_a_certificate_that_cannot_be_used_is_told_and_nothing_stays_up(broken: str, tmp_path: Path) -> None:
    make_certificate(tmp_path, "good", "DNS:localhost")
    make_certificate(tmp_path, "other", "DNS:localhost")
    if broken == "text":
        (tmp_path / "good.pem").write_text("no certificate")
    name = {"missing": "none.pem", "another's key": "other.pem", "text": "good.pem"}[broken]
    cluster = unique_name()
    config = write_config(tmp_path, cluster, ONE_NODE, f"api: {{certificate: {name}, private_key: good.key}}")
    done = shoal("up", "-f", str(config))
    assert done.returncode == 1
    assert (
        f"the certificate {tmp_path / name}, or its key {tmp_path / 'good.key'}, cannot be used"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert not state_directory(cluster).exists()
