"""A Ray cluster whose own channels go over TLS, as Ray's guide to it has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certificates import make_certificate
from tests.lans import SHARE, needs_hosts, workplace
from tests.ssh_hosts import HEALTH

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = "/root/shoal.yaml"


def test_the_whole_way_where_rays_channels_go_over_tls(tmp_path: Path) -> None:
    with workplace(tmp_path, ["head", "gpu-1", "gpu-2"], HEALTH) as lab:
        plain = dict(lab.variables)
        addresses = ["127.0.0.1", *(host.address for host in lab.lan.hosts)]
        named = ",".join(f"IP:{address}" for address in addresses)
        certificate, key = (Path(each).name for each in make_certificate(lab.share, "ray", named))
        lab.variables |= {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": f"{SHARE}/{certificate}",
            "RAY_TLS_SERVER_KEY": f"{SHARE}/{key}",
            "RAY_TLS_CA_CERT": f"{SHARE}/{certificate}",
        }
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
