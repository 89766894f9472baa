"""The page of Ray clusters that exist: its commands as they stand there, each on the host that it is for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import REPOSITORY
from tests.lans import Workplace, needs_hosts, workplace
from tests.ssh_hosts import HEALTH

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = REPOSITORY / "cluster/hosts/README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WORKERS = {"gpu-1": 2, "gpu-2": 3}
"""CPUs, in the place of the GPUs that the page's hosts have."""


def typed(lab: Workplace, host: Host, commands: str, timeout_s: float = 120.0) -> str:
    """What commands print that somebody types on a host; they must work."""
    programs = str(Path(sys.executable).parent)
    variables = {**lab.variables, "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin"}
    script = f"set -euo pipefail\nmkdir -p /root/lab; cd /root/lab\n{commands}"
    done = host.run("bash", "-c", script, environment=variables, timeout_s=timeout_s)
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    start, quickstart, connect = [text for language, text in blocks if language == "sh"]
    config, reached = [yaml.safe_load(text) for language, text in blocks if language == "yaml"]
    with workplace(tmp_path, ["first", *WORKERS, "laptop"], HEALTH) as lab:
        head, laptop = lab.head, lab.lan.host("laptop")
        first, other = start.splitlines()
        typed(lab, head, first)
        assert "--address=FIRST:6379 --num-gpus=8 " in other
        for name, cpus in WORKERS.items():
            line = other.replace("FIRST", head.address).replace("--num-gpus=8", f"--num-cpus={cpus}")
            typed(lab, lab.lan.host(name), line)
        head.file("/root/lab").mkdir(exist_ok=True)
        head.file("/root/lab/shoal.yaml").write_text(yaml.safe_dump(config))
        typed(lab, head, quickstart, 400)
        assert (reached["cluster"]["api"], "192.0.2.10:8270" in connect) == ({"host": "192.0.2.10"}, True)
        config["cluster"]["api"] = {"host": head.address}
        head.file("/root/lab/shoal.yaml").write_text(yaml.safe_dump(config))
        assert re.search(r"│ gpu-2 +│ alive", typed(lab, head, "shoal up && shoal status"))
        make, use = connect.replace("192.0.2.10", head.address).splitlines()
        token = typed(lab, head, make)
        laptop.file("/root/lab").mkdir(exist_ok=True)
        laptop.file("/root/lab/ann.token").write_text(token)
        typed(lab, laptop, use)
        assert re.search(r"│ gpu-2 +│ alive", typed(lab, laptop, "shoal status"))
        assert typed(lab, head, "shoal down").splitlines()[-1] == "cluster lab is down"
        assert "Total: 3" in typed(lab, head, "ray list nodes"), "Ray stays"
