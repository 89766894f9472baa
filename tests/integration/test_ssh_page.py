"""The page of hosts by SSH, its commands run as they stand there, in one shell, as a reader runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.lab.hosts.lan import REPOSITORY, Lan
from tests.lans import needs_hosts
from tests.ssh_hosts import PYTHON, USER, SshCaller, furnish

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = REPOSITORY / "cluster/hosts/ssh/README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "-- block"


def test_every_command_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    share.chmod(0o777)
    lab = tmp_path / "lab"
    lab.mkdir()
    with Lan(["head", "gpu-1", "gpu-2"], lab, shared={"/data": share}, users=[USER]) as lan:
        furnish(lan)
        caller = SshCaller(lan, tmp_path / "caller")
        caller.home.mkdir()
        blocks = BLOCK.findall(PAGE.read_text())
        (config,) = [text for language, text in blocks if language == "yaml"]
        commands = [text for language, text in blocks if language == "sh"]
        assert "pip install shoal " in commands[0]
        commands[0] = commands[0].replace("pip install", ": pip install")  # it is installed
        lines = ["set -euo pipefail"]
        for place, text in enumerate(commands):
            lines += [f"echo; echo '{MARK} {place}'", text]
            if place == 0:
                lines.append(f"cp {_adapted(caller, config, tmp_path)} section.json; python -c '{MERGE}'")
        programs = str(Path(sys.executable).parent)
        variables = caller.variables()
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=caller.home,
            env={**variables, "PATH": f"{programs}:{variables['PATH']}"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        told = re.split(rf"^{MARK} \d+\n", done.stdout, flags=re.MULTILINE)[1:]
        _, brought_up, used, ended = told
        assert "is valid: 3 nodes, 1 job, 1 app" in brought_up
        assert re.search(r"│ gpu-2 +│ alive", brought_up)
        assert re.search(r"stdlib-lm-\S+ succeeded at step", used)
        answer = json.loads(used.strip().splitlines()[-1])
        assert answer["choices"][0]["text"]
        assert " load average: " in ended
        assert "[raylet.out] " in ended
        assert ended.splitlines()[-1] == "cluster lab is down"
        assert [each for host in lan.hosts for each in host.processes()] == []


MERGE = (
    'import json, yaml; whole = yaml.safe_load(open("shoal.yaml"));'
    ' whole["cluster"] = json.load(open("section.json")); job = whole["train_jobs"]["stdlib-lm"];'
    ' job["steps"] = 20; yaml.safe_dump(whole, open("shoal.yaml", "w"))'
)
"""Takes the page's section; the training is shorter than a reader's."""


def _adapted(caller: SshCaller, config: str, directory: Path) -> Path:
    """The page's section `cluster`, for the hosts that there are."""
    addresses = {f"192.0.2.{10 + place}": host.address for place, host in enumerate(caller.lan.hosts)}
    for named, there in addresses.items():
        assert named in config
        config = config.replace(named, there)
    cluster: dict[str, Any] = yaml.safe_load(config)["cluster"]
    for kind in cluster["nodes"][1:]:
        kind["cpus"] = 2  # a host of these would say that it has all of the machine's
    assert cluster["ssh"] == {"user": USER, "install": "wheel"}
    cluster["ssh"] = caller.ssh(python=PYTHON)  # another test has it installed
    file = directory / "section.json"
    file.write_text(json.dumps(cluster))
    return file
