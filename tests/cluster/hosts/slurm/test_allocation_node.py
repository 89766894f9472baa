"""What a node of an allocation does beside being one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cluster.hosts.slurm import allocation_node
from cluster.hosts.slurm.allocation_node import watch_head
from tests.grpc_health import healthy_server, tls_of_ray


@pytest.mark.parametrize("over_tls", [False, True])
def test_a_head_that_answers_keeps_the_job_and_one_that_is_gone_gives_it_back(
    over_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the nodes' environment says of TLS counts, and not that of the batch step."""
    monkeypatch.setattr(allocation_node, "LOOK_S", 0.05)
    monkeypatch.setattr(allocation_node, "HEAD_SILENT_S", 0.5)
    gone, ended = threading.Event(), threading.Event()
    back: list[str] = []

    def requeue(number: str) -> None:
        back.append(number)
        gone.set()

    monkeypatch.setattr(allocation_node.slurm, "requeue", requeue)
    tls = tls_of_ray(tmp_path) if over_tls else {}
    with healthy_server(tls or None) as head:
        watcher = threading.Thread(target=watch_head, args=("7", head, tls, ended, True), daemon=True)
        watcher.start()
        assert not gone.wait(2.0), "it was given back though its head answers"
        for file in tls.values():
            if Path(file).exists():
                Path(file).rename(f"{file}.away")
        assert not gone.wait(1.0), "it was given back though nobody could ask the head"
        for file in tls.values():
            if Path(f"{file}.away").exists():
                Path(f"{file}.away").rename(file)
    assert gone.wait(15.0)
    watcher.join(15.0)
    assert (back, watcher.is_alive()) == (["7"], False)
