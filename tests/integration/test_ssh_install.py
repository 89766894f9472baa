"""A host that has Python and nothing else: Shoal is installed there, as it is here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.hosts.ssh.wheel import this_wheel, versions_here
from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import Lan
from tests.lans import needs_hosts
from tests.ssh_hosts import USER, SshCaller

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(1200)]

WHEELS = "/srv/wheels"
"""Where a host finds packages: it reaches no index."""
PIP = f"[global]\nno-index = true\nfind-links = {WHEELS}\nno-compile = true\n"
ENVIRONMENTS = f"/home/{USER}/.local/share/shoal/environments"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that Shoal depends on, in the versions that are here."""
    directory = tmp_path_factory.mktemp("wheels")
    wheel, constraints = directory / this_wheel().file_name, directory / "constraints.txt"
    wheel.write_bytes(this_wheel().content)
    constraints.write_text("\n".join(versions_here()))
    fetch = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(directory)]
    fetch += ["--constraint", str(constraints), str(wheel)]
    done = subprocess.run(fetch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wheel.unlink()  # it comes from the caller
    directory.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[Lan]:
    shared = {WHEELS: wheels}
    with Lan(["bare"], tmp_path_factory.mktemp("ssh"), shared=shared, users=[USER]) as lan:
        yield lan


def made_on(host: Host) -> list[Path]:
    """The environments there."""
    return [path for path in host.file(ENVIRONMENTS).iterdir() if path.name != ".lock"]


def test_shoal_is_installed_once_and_starts_there(lan: Lan, tmp_path: Path) -> None:
    (host,) = lan.hosts
    caller = SshCaller(lan, tmp_path / "caller")
    ssh = caller.ssh(install="wheel", python=f"{sys.base_prefix}/bin/python3")
    cluster = {
        "nodes": [{"name": "bare", "host": host.address}],
        "ssh": ssh,
        "storage": f"/home/{USER}/shoal",
    }
    caller.write(cluster)
    shutil.rmtree(host.file("/etc/xdg/pip"), ignore_errors=True)  # how this machine finds packages
    host.file("/etc/pip.conf").write_text("[global]\nno-index = true\n")
    told = caller.shoal("up", timeout_s=300)
    assert told.returncode == 1, told.stderr
    assert f"bare ({USER}@{host.address}): pip cannot make the environment there:" in told.stderr
    assert "shoal 0.1.0 depends on " in told.stderr, told.stderr
    assert made_on(host) == [], "half of one is left"

    host.file("/etc/pip.conf").write_text(PIP)
    document = caller.document("up", timeout_s=900)
    assert [node["name"] for node in document["nodes"]] == ["bare"]
    (made,) = made_on(host)
    before = (made / "complete").stat().st_mtime_ns
    python = f"{ENVIRONMENTS}/{made.name}/bin/python"
    ray = caller.shoal("ssh", "bare", python, "-c", "import ray; print(ray.__file__)")
    assert ray.stdout.splitlines()[-1].startswith(f"{ENVIRONMENTS}/{made.name}/lib/")
    assert caller.shoal("up").returncode == 0
    assert (made / "complete").stat().st_mtime_ns == before
    assert caller.shoal("down").returncode == 0
    assert host.names() == set()
