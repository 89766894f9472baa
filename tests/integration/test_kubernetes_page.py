"""The page of Kubernetes, its commands run as they stand there, in one shell, as a reader runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.lab.hosts.lan import REPOSITORY
from tests.kubernetes_site import kubernetes_site, needs_kubectl
from tests.ssh_hosts import HEALTH

pytestmark = [needs_kubectl, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = REPOSITORY / "cluster/hosts/kubernetes/README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "-- block"
MERGE = """
import json, yaml
whole = yaml.safe_load(open("shoal.yaml"))
whole["cluster"] = json.load(open("../section.json"))
whole["train_jobs"]["stdlib-lm"]["steps"] = 20
yaml.safe_dump(whole, open("shoal.yaml", "w"))
"""
"""Takes the page's section; the training is shorter than a reader's."""
PODMAN = '#!/bin/sh\necho "podman $@" >> {told}\n'
"""There is no registry here: an image is what this machine has installed."""


def adapted(config: str) -> dict[str, Any]:
    """The page's section `cluster`, for pods without GPUs, and with little memory."""
    cluster: dict[str, Any] = yaml.safe_load(config)["cluster"]
    assert cluster["nodes"][1] == {"name": "gpu", "count": 2, "cpus": 16, "gpus": 8}
    cluster["nodes"][1] = {"name": "gpu", "count": 2, "cpus": 2}
    assert cluster["kubernetes"].pop("memory") == "200Gi"
    cluster["kubernetes"]["storage_claim"] = "data"  # the one that there is
    return {**cluster, "env": HEALTH}


def test_every_command_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    (config,) = [text for language, text in blocks if language == "yaml"]
    commands = [text for language, text in blocks if language == "sh"]
    # It is installed: the environment is the one that runs this test.
    installed = "python3 -m venv venv && . venv/bin/activate\npip install shoal\n"
    assert installed in commands[0]
    commands[0] = commands[0].replace(installed, "")
    lines = ["set -euo pipefail"]
    for place, text in enumerate(commands):
        lines += [f"echo; echo '{MARK} {place}'", text]
        if place == 0:
            lines.append(f"python -c '{MERGE}'")
    with kubernetes_site(tmp_path) as (server, operator, user):
        programs, told = tmp_path / "bin", tmp_path / "podman.told"
        programs.mkdir()
        (programs / "podman").write_text(PODMAN.format(told=told))
        (programs / "podman").chmod(0o755)
        (user.home / "section.json").write_text(json.dumps(adapted(config)))
        path = f"{programs}:{user.environment['PATH']}:{Path(sys.executable).parent}"
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=user.home,
            env={**user.environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        _, brought_up, used, ended = re.split(rf"^{MARK} \d+\n", done.stdout, flags=re.MULTILINE)[1:]
        image = "registry.example.org/shoal"
        assert told.read_text() == f"podman build -t {image} .\npodman push {image}\n"
        assert "\nFROM " in (user.home / "demo/Containerfile").read_text()
        assert "is valid: 3 nodes, 1 job, 1 app" in brought_up
        assert re.search(r"│ lab-gpu-worker-1 +│ alive", brought_up)
        assert re.search(r"stdlib-lm-\S+ succeeded at step", used)
        assert json.loads(used.strip().splitlines()[-1])["choices"][0]["text"]
        assert ended.splitlines()[-1] == "cluster lab is down"
        assert {plural for plural, _, _ in server.objects} == {"customresourcedefinitions", "namespaces"}
        assert operator.pods is None
