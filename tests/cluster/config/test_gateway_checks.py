"""What does not go with several gateways, and with their front."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.loader import load_config
from tests.cluster.config.config_files import mistakes, write


@pytest.mark.parametrize(
    ("cluster", "path", "words"),
    [
        ("gateway: {count: 0}", "gateway.count", 'should be "all", or a number from 1 to 1000, was 0'),
        ("gateway: {count: some}", "gateway.count", "was 'some'"),
        ("gateway: {front: nginx}", "gateway.front", "haproxy"),
        ("gateway: {front: none, address_requests: 5}", "gateway.address_requests", "needs a front"),
        ("gateway: {front: none, node_port: 5}", "gateway.node_port", "`gateway.front: haproxy`"),
        (
            "gateway: {certificate: a}",
            "gateway.private_key",
            "is needed beside",
        ),
        (
            "provider: existing, gateway: {front: none, count: 2}",
            "gateway.count",
            "needs `gateway.keys`, or",
        ),
    ],
)
def test_what_is_wrong_is_named(cluster: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"cluster: {{{cluster}}}\n")
    assert found.path == f"cluster.{path}"
    assert words in found.message


@pytest.mark.parametrize(
    "cluster",
    [
        "gateway: {count: all}",
        "gateway: {count: all, front: none}",
        "gateway: {count: 3, address_connections: 10, node_port: 8100}",
        "gateway: {certificate: a, private_key: b}",
        "provider: existing, gateway: {count: all}",
    ],
)
def test_what_goes_together_is_taken(cluster: str, tmp_path: Path) -> None:
    load_config(write(tmp_path, f"cluster: {{{cluster}}}\n"))
