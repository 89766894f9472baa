"""The README's tour, its commands run as they stand there, in one shell, as a reader runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.state.record import RECORD_FILE, ClusterRecord, read_record
from cluster.state.state_directory import state_directory
from tests.clusters import REPOSITORY, caller_environment, leftovers, shoal, unique_name

TIMEOUT_S = 500.0
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "-- block"


def blocks_of_tour() -> list[tuple[str, str]]:
    """(language, text) of every block of commands in the tour."""
    readme = (REPOSITORY / "README.md").read_text()
    tour = readme.partition("## A tour\n")[2].partition("\n## ")[0]
    return BLOCK.findall(tour)


def script_of(blocks: list[tuple[str, str]], cluster_name: str) -> str:
    """One bash script of all blocks; the cluster of the test has a name that no other has."""
    lines = ["set -euo pipefail"]
    for index, (language, text) in enumerate(blocks):
        lines.append(f"echo; echo '{MARK} {index}'")
        lines.append(text if language == "sh" else f"python - <<'END'\n{text}END\necho")
        if index == 0:
            lines.append(f"sed -i 's/name: demo /name: {cluster_name} /' shoal.yaml")
        if "shoal up\n" in text:
            lines.append(f"cp {state_directory(cluster_name) / RECORD_FILE} .")
    return "\n".join(lines)


@pytest.fixture
def name(tmp_path: Path) -> Iterator[str]:
    """A cluster's name; whatever the tour left of it is taken down."""
    name = unique_name()
    yield name
    if read_record(name) is not None:
        shoal("down", "-f", str(tmp_path / "demo" / "shoal.yaml"))


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_every_command_of_the_tour_does_what_it_says(tmp_path: Path, name: str) -> None:
    blocks = blocks_of_tour()
    variables = caller_environment()
    path = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script_of(blocks, name)],
        cwd=tmp_path,
        env={**variables, "PATH": path, "XDG_CONFIG_HOME": str(tmp_path / "config")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    told = re.split(rf"^{MARK} \d+\n", done.stdout, flags=re.MULTILINE)[1:]

    checked, trained, asked, streamed, by_hand, elsewhere, ended = told
    assert "is valid: 3 nodes, 1 job, 1 app" in checked
    assert re.search(r"stdlib-lm-\S+ succeeded at step 60", trained)
    assert re.search(r"stdlib-lm +1 ", trained), "the model is listed"
    answer = json.loads(asked.strip().splitlines()[-1])
    assert answer["model"] == "chat"
    assert answer["choices"][0]["text"]
    assert streamed.strip()
    assert "published model=by-hand@1" in by_hand
    assert by_hand.count("finished status=succeeded step=30") >= 2, "the job's own output, and `shoal logs`"
    assert f"cluster {name}" in by_hand
    assert f"connected to cluster {name} as ann (run)" in elsewhere
    assert re.search(r"stdlib-lm-\S+ +succeeded +60/60", elsewhere)
    assert ended.splitlines()[-1] == f"cluster {name} is down"
    facts = json.loads((tmp_path / "demo" / RECORD_FILE).read_text())
    assert leftovers(ClusterRecord(**{**facts, "nodes": ()})) == {}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    published = tmp_path / "demo" / "shoal-storage" / "models" / "stdlib-lm" / "1"
    tokens = AutoTokenizer.from_pretrained(published)("def f():", return_tensors="pt")
    assert AutoModelForCausalLM.from_pretrained(published)(**tokens).logits.isfinite().all()
