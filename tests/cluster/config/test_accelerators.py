"""Jobs and apps that name a kind of accelerator: the name is checked, and only nodes of it are room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes, position

NODES = """\
cluster:
  nodes:
    - {name: head, cpus: 0}
    - {name: big, cpus: 16, gpus: 8, accelerator: H100-SXM}
    - {name: small, count: 2, cpus: 16, gpus: 2, accelerator: L4}
"""
JOB = (
    NODES
    + """\
train_jobs:
  j:
    accelerator: KIND
    batch: {global: 16, micro: 1}
    workers: {min: WORKERS, cpus: 1, gpus: 1}
"""
)
APP = (
    NODES
    + """\
train_jobs:
  lm: {publish: lm, workers: {min: 1}}
serve_apps:
  a:
    model: lm
    accelerator: KIND
    engine: torch
    tensor: RANKS
    gpus: 1
"""
)


@pytest.mark.parametrize(
    ("text", "section"),
    [(JOB.replace("WORKERS", "1"), "train_jobs.j"), (APP.replace("RANKS", "1"), "serve_apps.a")],
)
def test_a_kind_that_no_node_has_is_found_with_its_line_and_what_is_allowed(
    text: str, section: str, tmp_path: Path
) -> None:
    text = text.replace("KIND", "h100")
    (found,) = mistakes(tmp_path, text)
    assert (found.line, found.column) == position(text, "h100")
    assert found.path == f"{section}.accelerator"
    assert "should be one of `H100-SXM`, `L4` (cluster.nodes), was `h100`" in found.message


def test_a_near_miss_is_guessed(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, JOB.replace("WORKERS", "1").replace("KIND", "H100-SMX"))
    assert found.message.endswith("did you mean `H100-SXM`?")


def test_where_no_node_has_an_accelerator_none_can_be_asked_for(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, "train_jobs: {j: {accelerator: L4}}\n")
    assert "no entry of cluster.nodes has an `accelerator`, was `L4`" in found.message


def test_only_nodes_of_the_kind_are_room_for_a_job(tmp_path: Path) -> None:
    fits = JOB.replace("KIND", "L4").replace("WORKERS", "4")
    assert load(tmp_path, fits).config.train_jobs["j"].accelerator == "L4"
    text = JOB.replace("KIND", "L4").replace("WORKERS", "8")
    (found,) = mistakes(tmp_path, text)
    assert found.path == "train_jobs.j.workers.min"
    assert "the nodes small × 2 (16 CPUs and 2 GPUs) hold 4 of them" in found.message
    load(tmp_path, text.replace("accelerator: L4\n    batch", "batch"))
    load(tmp_path, text.replace("accelerator: L4\n    batch", "accelerator: H100-SXM\n    batch"))


def test_only_nodes_of_the_kind_are_room_for_an_app(tmp_path: Path) -> None:
    load(tmp_path, APP.replace("KIND", "H100-SXM").replace("RANKS", "4"))
    (found,) = mistakes(tmp_path, APP.replace("KIND", "L4").replace("RANKS", "4"))
    assert found.path == "serve_apps.a.tensor"
    assert "needs 4 CPUs and 4 GPUs on one node; none of the nodes small × 2" in found.message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("weight: 0", "should be a number above 0, was 0"),
        ("priority: 1.5", "should be a whole number, was 1.5"),
    ],
)
def test_priorities_are_whole_and_weights_above_nothing(value: str, said: str, tmp_path: Path) -> None:
    for text in (f"train_jobs: {{j: {{{value}}}}}\n", f"serve_apps: {{a: {{model: ./, {value}}}}}\n"):
        (found,) = [mistake for mistake in mistakes(tmp_path, text) if value.split(":")[0] in mistake.path]
        assert found.message == said


def test_times_of_sharing_are_no_less_than_nothing(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "cluster: {sharing: {patience_s: -1, settle_s: -0.5, avoid_after: -1}}\n")
    keys = ["patience_s", "settle_s", "avoid_after"]
    assert [mistake.path for mistake in found] == [f"cluster.sharing.{key}" for key in keys]
