"""What an app's replicas and its rollout need, and the nodes do not have, is said before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes

NODES = "cluster: {nodes: [{name: a, cpus: 4}]}\n"
JOB = "train_jobs: {lm: {task: causal_lm, publish: lm}}\n"


@pytest.mark.parametrize(
    ("app", "path", "words"),
    [
        (
            "rollout: blue_green, replicas: {min: 3}",
            "rollout",
            "two full sets of replicas, 6 of 1 CPU each; the nodes a .4 CPUs. hold 4: rolling",
        ),
        ("cpus: 8, replicas: {min: 0}", "tensor", "a replica of 1 rank needs 8 CPUs on one node"),
        ("rollout: canary", "rollout", "rolling"),
        ("update: {max_error_rate: 1.5}", "update.max_error_rate", "1"),
        ("autoscale: {target_kv_cache_use: 2}", "autoscale.target_kv_cache_use", "1"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, app: str, path: str, words: str) -> None:
    text = NODES + JOB + "serve_apps:\n  chat: {model: lm@latest, " + app + "}\n"
    found = mistakes(tmp_path, text)
    assert [mistake.path for mistake in found] == [f"serve_apps.chat.{path}"]
    assert re.search(words, found[0].message), found[0].message


@pytest.mark.parametrize(
    "app", ["rollout: blue_green, replicas: {min: 2}", "replicas: {min: 0}", "rollout: in_place"]
)
def test_what_there_is_room_for_is_fine(tmp_path: Path, app: str) -> None:
    load(tmp_path, NODES + JOB + "serve_apps:\n  chat: {model: lm@latest, " + app + "}\n")
