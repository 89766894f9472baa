"""`shoal batch` of a real model whose processes are killed: every row once, with a quiet run's answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from cluster.files.storage import Storage
from cluster.models.registry import Registry
from tests.clusters import LiveCluster, caller_environment, shoal, shoal_command
from tests.serve_apps.tiny_model import make_model

pytestmark = pytest.mark.slow

ROWS = 400
SHARD_ROWS = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def config(running_cluster: LiveCluster, place: Path) -> Path:
    """The running cluster with an app of one rank, which follows the newest model, and one of two."""
    storage = Storage(running_cluster.record.storage)
    Registry(storage).publish("batch-lm", make_model(place / "model"), {})
    path = place / "shoal.yaml"
    cluster = running_cluster.config_path.read_text().replace("./", f"{running_cluster.config_path.parent}/")
    path.write_text(
        f"{cluster}serve_apps:\n  one: {{model: batch-lm@latest}}\n  two: {{model: batch-lm@1, tensor: 2}}\n"
    )
    return path


@pytest.fixture(scope="module")
def source(place: Path) -> Path:
    """Two files of prompts, one of which is too long for the model."""
    (place / "in").mkdir()
    rows = [{"id": i, "prompt": f"def f{i}(x):", "max_tokens": 20 + i % 40} for i in range(ROWS)]
    rows[7]["prompt"] = "x" * 500
    for name, part in (("a", rows[:150]), ("b", rows[150:])):
        pq.write_table(pa.Table.from_pylist(part), place / "in" / f"{name}.parquet", row_group_size=64)
    return place / "in"


@pytest.fixture(scope="module")
def quiet(config: Path, source: Path, place: Path) -> list[dict[str, Any]]:
    """The rows of an undisturbed run."""
    done = finish(start("one", config, source, place / "quiet"))
    assert (done["rows"], done["failed"], done["skipped"]) == (ROWS, 1, 0)
    return read(place / "quiet")


def start(app: str, config: Path, source: Path, output: Path) -> subprocess.Popen[str]:
    command = shoal_command(
        "batch", app, "-f", str(config), "--json", "--input", str(source), "--output", str(output)
    )
    return subprocess.Popen(
        [*command, "--temperature", "0", "--rows-per-shard", str(SHARD_ROWS)],
        env=caller_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(command: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = command.communicate(timeout=200)
    assert command.returncode == 0, error
    document: dict[str, Any] = json.loads(out)
    return document


@contextmanager
def begun(app: str, config: Path, source: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has written some shards."""
    command = start(app, config, source, output)
    pause, deadline = threading.Event(), time.monotonic() + 120
    try:
        while len(list(output.glob("part-*"))) < 3:
            assert command.poll() is None, command.communicate()[1]
            assert time.monotonic() < deadline
            pause.wait(0.02)
        yield command
    finally:
        command.kill()
        command.communicate()


def read(output: Path) -> list[dict[str, Any]]:
    return ds.dataset(output, format="parquet").to_table().to_pylist()


def test_no_process_of_a_run_outlives_it(
    running_cluster: LiveCluster, quiet: list[dict[str, Any]], config: Path, source: Path, place: Path
) -> None:
    # From inside the cluster, too.
    command = [sys.executable, "-m", "serve_apps.batch", "two", "-f", str(config), "--temperature", "0"]
    done = subprocess.run(
        [*command, "--input", str(source), "--output", str(place / "quiet-two")],
        env=running_cluster.environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == ROWS
    assert read(place / "quiet-two") == quiet
    # An engine that is not stopped keeps its process, which waits for the engine's thread for ever.
    pause, deadline = threading.Event(), time.monotonic() + 20
    while running_cluster.processes("ray::MapWorker") or running_cluster.processes("ray::_Rank"):
        assert time.monotonic() < deadline
        pause.wait(0.1)


def test_the_answers_are_those_of_transformers(quiet: list[dict[str, Any]], place: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    reference = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32).eval()
    assert [row["id"] for row in quiet] == list(range(ROWS))
    assert "maximum context length" in quiet[7]["error"]
    for row in quiet[:5] + quiet[-5:]:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=row["max_tokens"],
            do_sample=False,
            pad_token_id=0,
        )
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        # Random weights do not end where characters do.
        assert row["answer"].rstrip("\ufffd") == expected.rstrip("\ufffd")
        assert row["model_version"] == "batch-lm@1"


@pytest.mark.parametrize("app", ["one", "two"])
def test_a_killed_command_is_resumed_with_the_model_it_began_with(
    app: str,
    running_cluster: LiveCluster,
    config: Path,
    source: Path,
    place: Path,
    quiet: list[dict[str, Any]],
) -> None:
    output = place / f"killed-{app}"
    with begun(app, config, source, output) as command:
        command.kill()
        command.wait()
    there = {path: path.stat().st_mtime_ns for path in output.glob("part-*")}
    assert SHARD_ROWS * len(there) < ROWS
    # The name `latest` means another model now, whose answers differ.
    newer = make_model(place / f"model-{app}", seed=1)
    Registry(Storage(running_cluster.record.storage)).publish("batch-lm", newer, {})
    document = finish(start(app, config, source, output))
    assert document["model"] == "batch-lm@1"
    assert document["rows"] == ROWS
    # Engines that outlive the command by a moment may have finished what they had.
    assert SHARD_ROWS * len(there) - SHARD_ROWS <= document["skipped"] < ROWS
    assert all(path.stat().st_mtime_ns == before for path, before in there.items())
    assert read(output) == quiet
    again = finish(start(app, config, source, output))
    assert again["skipped"] == ROWS


def test_a_control_api_that_is_killed_is_asked_again(
    running_cluster: LiveCluster, config: Path, source: Path, place: Path, quiet: list[dict[str, Any]]
) -> None:
    output = place / "api-killed"
    with begun("two", config, source, output) as command:
        (api,) = running_cluster.processes("ray::ApiServer")
        api.kill()
        document = finish(command)
    assert document["rows"] == ROWS
    assert document["skipped"] > 0, "it went on where it was"
    assert read(output) == quiet


@pytest.mark.parametrize("title", ["ray::_Rank", "ray::MapWorker"])
def test_a_killed_rank_is_replaced_and_its_shards_are_repeated(
    title: str,
    running_cluster: LiveCluster,
    config: Path,
    source: Path,
    place: Path,
    quiet: list[dict[str, Any]],
) -> None:
    output = place / title.replace(":", "")
    with begun("two", config, source, output) as command:
        (rank,) = running_cluster.processes(title)
        rank.kill()
        document = finish(command)
    assert (document["rows"], document["failed"], document["skipped"]) == (ROWS, 1, 0)
    assert read(output) == quiet


def test_wrong_requests_say_what_is_wrong_and_leave_nothing(config: Path, source: Path, place: Path) -> None:
    out = str(place / "wrong")
    for arguments, says in (
        (("three", "--input", str(source), "--output", out), "no app `three`"),
        (("one", "--input", str(place / "nowhere"), "--output", out), "cannot be read as Parquet"),
        (("one", "--input", str(source), "--output", out, "--temperature", "3"), "'temperature' is wrong"),
        (
            (
                *("one", "--input", str(source), "--output", out, "--max-tokens", "9999"),
                *("--set", "limits.max_tokens=256"),
            ),
            "at most 256",
        ),
        (("one", "--input", str(source), "--output", str(place)), "is not empty"),
    ):
        done = shoal("batch", *arguments, "-f", str(config))
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    assert not Path(out).exists()
