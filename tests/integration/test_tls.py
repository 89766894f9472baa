"""Clusters where Ray's own channels go over TLS, as its guide has them: one that exists, and our own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.hosts.slurm.allocation_node import HEAD_SILENT_S
from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import Lan
from tests.grpc_health import tls_of_ray
from tests.lans import SHARE, needs_hosts, workplace
from tests.slurm_hosts import SlurmUser, needs_slurm, slurm_site_of
from tests.ssh_hosts import HEALTH, USER, SshCaller, furnish

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = "/root/shoal.yaml"
HELLO = {"task": "script", "script": "hello.py", "workers": {"min": 2, "max": 2}}


def files_of(folder: Path, mounted: str, hosts: list[Host]) -> dict[str, str]:
    """Ray's variables, with files in a folder that hosts find elsewhere; everybody there may read them."""
    files = tls_of_ray(folder, *(host.address for host in hosts))
    for file in folder.iterdir():
        file.chmod(0o644)
    return {name: value.replace(str(folder), mounted) for name, value in files.items()}


def test_the_whole_way_on_one_that_exists(tmp_path: Path) -> None:
    with workplace(tmp_path, ["head", "gpu-1", "gpu-2"], HEALTH) as lab:
        plain = dict(lab.variables)
        lab.variables |= files_of(lab.share, SHARE, lab.lan.hosts)
        lab.start_ray(lab.head, "--num-cpus=0")
        for host, cpus in zip(lab.lan.hosts[1:], (2, 3), strict=True):
            lab.start_ray(host, f"--num-cpus={cpus}")
        cluster = {"name": "lab", "provider": "existing", "storage": f"{SHARE}/shoal"}
        lab.head.file(CONFIG).write_text(yaml.safe_dump({"cluster": cluster}))

        told = lab.shoal("quickstart", "-f", CONFIG, "--dir", "/root/tour", "--keep", "--json", timeout_s=400)
        assert told.returncode == 0, told.stderr
        report: dict[str, Any] = json.loads(told.stdout)
        assert [step["name"] for step in report["steps"] if not step["ok"]] == []

        config = "/root/tour/shoal.yaml"
        lab.variables = plain  # as in a shell that says nothing of TLS: it is known of the cluster
        nodes = {row["name"]: row["alive"] for row in lab.document("status", "-f", config)["nodes"]}
        assert nodes == {"head": True, "gpu-1": True, "gpu-2": True}
        down = lab.shoal("down", "-f", config)
        assert (down.returncode, "does not answer" in down.stderr) == (0, False), down.stderr
        assert not [each for each in lab.lan.hosts if each.running("ray::Broker")]
        refused = lab.shoal("up", "-f", config)
        assert refused.returncode == 1
        assert "though something listens there: does it use TLS, and RAY_USE_TLS" in refused.stderr


def test_nodes_by_ssh(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir(mode=0o777)
    share.chmod(0o777)
    with Lan(["head", "gpu-1", "gpu-2"], tmp_path, shared={SHARE: share}, users=[USER]) as lan:
        furnish(lan)
        caller = SshCaller(lan, tmp_path / "caller")
        env = {**HEALTH, **files_of(share, SHARE, lan.hosts)}
        caller.write({"storage": f"{SHARE}/shoal", "env": env}, train_jobs={"hello": HELLO})
        (caller.home / "hello.py").write_text("print('hello')")
        assert [node["name"] for node in caller.document("up")["nodes"]] == ["head", "gpu-1", "gpu-2"]
        trained = caller.shoal("train", "hello")
        assert trained.returncode == 0, trained.stderr
        assert caller.shoal("down").returncode == 0
        assert [host.names() for host in lan.hosts] == [set(), set(), set()]


@needs_slurm
def test_nodes_of_slurm(tmp_path: Path) -> None:
    with slurm_site_of(tmp_path) as site:
        user = SlurmUser(site, tmp_path / "homes")
        (user.home / "tls").mkdir()
        env = {**HEALTH, **files_of(user.home / "tls", f"/home/{user.name}/tls", site.nodes)}
        user.write({"env": env})
        assert user.shoal("up").returncode == 0
        time.sleep(HEAD_SILENT_S + 10.0)  # the nodes look whether the head is there
        status = user.document("status")
        assert [row["alive"] for row in status["nodes"]] == [True, True]
        assert " Restarts=0 " in user.slurm("scontrol", "show", "job")
        assert user.shoal("down").returncode == 0
