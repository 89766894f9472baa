"""Hosts in the config: named once, and only where Shoal starts Ray on them; nothing of theirs is sought."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.loader import load_config
from tests.cluster.config.config_files import mistakes, write

HOSTS = "cluster: {provider: ssh, storage: /data, nodes: [{name: head, host: h, cpus: 0}, %s]}\n"


@pytest.mark.parametrize(
    ("node", "path", "words"),
    [
        ("{name: a}", "cluster.nodes.1", "a needs `host`, or `hosts`, with `provider: ssh`"),
        ("{name: a, host: x, hosts: [y]}", "cluster.nodes.1", "a has both `host` and `hosts`"),
        ("{name: a, host: x, count: 2}", "cluster.nodes.1", "a cannot have a `count`: each host is one node"),
        ("{name: a, host: h}", "cluster.nodes.1.host", "h is the node head already"),
        ("{name: a, hosts: [x, x]}", "cluster.nodes.1.hosts", "x is the node a-1 already"),
        ("{name: a, host: -oProxyCommand=x}", "cluster.nodes.1.host", "should be what a host is called"),
        ("{name: a, host: ann@x}", "cluster.nodes.1.host", "should be what a host is called"),
    ],
)
def test_hosts_that_are_named_wrongly(node: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, HOSTS % node)
    assert found.path == path
    assert words in found.message


def test_one_host_may_be_two_nodes_by_its_ports(tmp_path: Path) -> None:
    file = write(tmp_path, HOSTS % "{name: a, host: h, port: 2222}")
    assert load_config(file).config.cluster.node_shapes()[1][0] == "a"


@pytest.mark.parametrize(
    ("cluster", "path", "words"),
    [
        ("{nodes: [{name: a, host: x}]}", "cluster.nodes.0.host", "is for `provider: ssh`"),
        ("{nodes: [{name: a, port: 22}]}", "cluster.nodes.0.port", "is for `provider: ssh`"),
        ("{ssh: {user: ann}}", "cluster.ssh", "is for `provider: ssh`"),
        ("{provider: ssh, storage: /d}", "cluster.nodes", "has to name the hosts"),
        (
            "{provider: ssh, nodes: [{name: a, host: x}]}",
            "cluster.storage",
            "should be a path from the root, that all hosts have mounted, or a URI, was `./shoal-storage`",
        ),
        (
            "{provider: ssh, storage: 's3://b/x', nodes: [{name: a, host: x}], gateway: {keys: keys.yaml}}",
            "cluster.gateway.keys",
            "should be a path from the root, on the head, was `keys.yaml`",
        ),
        (
            "{provider: ssh, storage: /d, address: 'x:1', nodes: [{name: a, host: x}]}",
            "cluster.address",
            "is for `provider: existing`",
        ),
    ],
)
def test_what_belongs_to_another_provider(cluster: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"cluster: {cluster}\n")
    assert found.path == path
    assert words in found.message


def test_what_lies_on_the_nodes_is_not_looked_for_here(tmp_path: Path) -> None:
    jobs = """
train_jobs:
  lm:
    data: {source: /nowhere/data.parquet, tokenizer: /nowhere/tokenizer}
    workers: {min: 2}
serve_apps:
  chat: {model: /nowhere/model}
"""
    load_config(write(tmp_path, HOSTS % "{name: a, host: x}" + jobs))
    whole = HOSTS.replace("cpus: 0", "cpus: 0, gpus: 0") % "{name: a, host: x, cpus: 1, gpus: 0}"
    (found,) = mistakes(tmp_path, whole + jobs)
    assert found.path == "train_jobs.lm.workers.min", "the room is as the file says it, where it says all"


def test_what_the_file_leaves_open_its_host_says(tmp_path: Path) -> None:
    known = load_config(write(tmp_path, HOSTS % "{name: a, host: x, cpus: 4}")).config.cluster
    assert known.known_nodes == ()
