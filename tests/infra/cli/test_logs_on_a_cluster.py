"""`shoal logs APP` on a real cluster: of the living and the dead, by replica, by request, and as it comes."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.clusters import LiveCluster, caller_environment, shoal_command, started
from tests.serve_apps.drills import FAKE, THREE_WORKERS, Stage, staged, until
from tests.serve_apps.notes import notes_of

pytestmark = pytest.mark.slow

WITHIN_S = 30.0


def ask(stage: Stage, request_id: str, prompt: int, **more: Any) -> httpx.Response:
    body = {"model": "chat", "prompt": [prompt], "max_tokens": 2, **more}
    url = f"{stage.url}/v1/completions"
    return httpx.post(url, json=body, headers={"x-request-id": request_id}, timeout=60)


def documents(cluster: LiveCluster, *arguments: str) -> list[dict[str, Any]]:
    done = cluster.shoal("logs", "chat", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def following(
    cluster: LiveCluster, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str]]]:
    """A `shoal logs chat --follow`, and its lines."""
    command = shoal_command("logs", "chat", "--follow", *arguments, "-f", str(cluster.config_path))
    process = subprocess.Popen(
        command, env=caller_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()


def comes(lines: queue.Queue[str], pattern: str) -> str:
    """The first line that matches."""
    end = time.monotonic() + WITHIN_S
    seen = []
    while (left := end - time.monotonic()) > 0:
        try:
            seen.append(lines.get(timeout=left))
        except queue.Empty:
            break
        if re.search(pattern, seen[-1]):
            return seen[-1]
    raise AssertionError(f"no {pattern!r} in {''.join(seen)}")


def test_logs_of_an_app(running_cluster: LiveCluster, tmp_path: Path) -> None:
    with staged(running_cluster, FAKE, tmp_path / "model", tensor=2) as stage:
        by_request(running_cluster, stage)
        of_the_dead(running_cluster, stage)
        names_that_are_none(running_cluster)
        on_and_on(running_cluster, stage)


def by_request(cluster: LiveCluster, stage: Stage) -> None:
    """An error of a replica is found by the id that its client has."""
    assert ask(stage, "fine-1", 9).status_code == 200
    for request_id, stream in (("broken-1", False), ("broken-2", True)):
        answer = ask(stage, request_id, 3, stream=stream)
        assert answer.status_code in (400, 503)
        found = documents(cluster, "--request", request_id)
        kinds = {document["source"] for document in found}
        assert kinds == {"gateway", "replica"}
        assert {document["request_id"] for document in found} == {request_id}
        (ended,) = [d["line"] for d in found if d["source"] == "gateway" and "endpoint" in d["line"]]
        assert ended["status"] == answer.status_code
        told = [d["line"]["message"] for d in found if d["source"] == "replica"]
        assert any("broken on request" in message for message in told)
    text = cluster.shoal("logs", "chat", "--request", "broken-1").stdout
    assert re.search(
        r"^\[\w+\] [\d:.]+ ERROR .*broken on request.* \(request broken-1\)$", text, re.MULTILINE
    )
    assert "fine-1" not in text
    # All lines, a process at a time; ranks are among them.
    everything = documents(cluster)
    assert {d["source"] for d in everything} == {"gateway", "replica", "rank"}
    assert any(d["source"] == "rank" and d["rank"] == 1 and "follows" in str(d["line"]) for d in everything)
    last = documents(cluster, "--tail", "1")
    assert len(last) < len(everything)
    counts = {(d["source"], d["replica"]): 0 for d in last}
    for d in last:
        counts[d["source"], d["replica"]] += 1
    assert max(counts.values()) <= 2, "one of its standard output, one of its standard error"


def of_the_dead(cluster: LiveCluster, stage: Stage) -> None:
    """People look when a replica has just been killed and replaced."""
    answer = ask(stage, "last-words", 3)
    victim = answer.headers["x-shoal-replica"].split(",")[0]
    (notes,) = [notes for notes in notes_of(stage.model_path) if notes.replica == victim]
    os.kill(notes.pid, signal.SIGKILL)
    until(lambda: len(stage.replicas()) == 2, WITHIN_S)
    found = documents(cluster, "--replica", victim)
    assert {document["replica"] for document in found} == {victim}
    assert any("broken on request" in str(document["line"]) for document in found)
    assert {document["source"] for document in found} == {"replica", "rank"}
    text = cluster.shoal("logs", "chat", "--replica", victim).stdout
    assert f"[{victim} rank 1] " in text


def names_that_are_none(cluster: LiveCluster) -> None:
    for arguments, said in (
        (["nobody"], "neither an app nor a job 'nobody'; the apps are chat"),
        (["chat", "--job"], "no job 'chat'"),
        (["nobody", "--app"], "no app 'nobody'"),
        (["chat", "--replica", "nobody"], "chat has no replica 'nobody'; there are "),
        (["chat", "--app", "--job"], "exclude each other"),
    ):
        done = cluster.shoal("logs", *arguments)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def on_and_on(cluster: LiveCluster, stage: Stage) -> None:
    """New lines come, of new processes too, until Ctrl-C."""
    with following(cluster, "--tail", "0") as (process, lines), following(cluster) as (other, all_lines):
        comes(all_lines, "fine-1")
        # Whatever was there is past; until it listens, lines are asked for again.
        end = time.monotonic() + WITHIN_S
        number = 0
        while lines.empty() and time.monotonic() < end:
            number += 1
            ask(stage, f"later-{number}", 9)
            time.sleep(0.5)
        assert "later-" in comes(lines, "later-")
        before = {notes.replica for notes in notes_of(stage.model_path)}
        os.kill(stage.replicas()[0].pid, signal.SIGKILL)
        until(lambda: len({notes.replica for notes in stage.replicas()} - before) == 1, WITHIN_S)
        (newest,) = {notes.replica for notes in stage.replicas()} - before
        comes(lines, rf"^\[{newest} rank 1\] .*follows")
        for each in (process, other):
            each.send_signal(signal.SIGINT)
            assert each.wait(15) == 0
            assert each.stderr is not None
            errors = each.stderr.read()
            assert "Traceback" not in errors
            assert "Exception" not in errors


def test_logs_of_a_replica_whose_node_is_gone(tmp_path: Path) -> None:
    with (
        started(tmp_path / "cluster", *THREE_WORKERS) as cluster,
        staged(cluster, FAKE, tmp_path / "model", tensor=2) as stage,
    ):
        victim = ask(stage, "last-words", 3).headers["x-shoal-replica"].split(",")[0]
        (notes,) = [notes for notes in notes_of(stage.model_path) if notes.replica == victim]
        raylet = psutil.Process(notes.pid).parent()
        assert raylet is not None
        raylet.kill()
        until(lambda: not psutil.pid_exists(notes.pid) and len(stage.replicas()) == 2, 2 * WITHIN_S)
        found = documents(cluster, "--replica", victim, "--request", "last-words")
        assert any("broken on request" in str(document["line"]) for document in found)
