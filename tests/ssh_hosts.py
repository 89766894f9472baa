"""Hosts that somebody has accounts on, and a machine that is none of them: this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import REPOSITORY, Lan

USER = "ann"
PYTHON = "~/venv/bin/python"
"""The interpreter on each host that has Shoal."""
GREETING = "echo 'Welcome to the cluster; mind the gap'\n"
"""In everybody's .bashrc, as many a site has it."""
HEALTH = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "8",
}
"""Of Ray: a silent node is dead after a few seconds, and not after a minute; so is one without a head."""


def python_on(host: Host, path: str = f"/home/{USER}/venv/bin/python", source: str | None = None) -> None:
    """Put an interpreter there: this one, with this very Shoal; or a script of the shell."""
    file = host.file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        source or f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} "$@"\n', encoding="utf-8"
    )
    file.chmod(0o755)


def furnish(lan: Lan) -> None:
    """Give everybody an environment with Shoal, and a shell that talks."""
    for host in lan.hosts:
        python_on(host)
        host.file(f"/home/{USER}/.bashrc").write_text(GREETING)


@dataclass
class SshCaller:
    """Whoever has the config file, on this machine.

    Attributes:
        home: for what the commands keep.
    """

    lan: Lan
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.home / "shoal.yaml"

    def write(self, cluster: Mapping[str, Any], **more: Any) -> Path:
        """Write the config; `cluster` has what differs from one of three hosts."""
        self.home.mkdir(exist_ok=True)
        head, *others = [host.address for host in self.lan.hosts]
        section = {
            "name": "lab",
            "provider": "ssh",
            "nodes": [
                {"name": "head", "host": head, "cpus": 0},
                *[
                    {"name": f"gpu-{place}", "host": host, "cpus": cpus}
                    for place, (host, cpus) in enumerate(zip(others, (2, 3, 2), strict=False), 1)
                ],
            ],
            "ssh": self.ssh(),
            "env": dict(HEALTH),
            **cluster,
        }
        self.config.write_text(yaml.safe_dump({"cluster": section, **more}))
        return self.config

    def ssh(self, **more: Any) -> dict[str, Any]:
        """The section `ssh`."""
        return {
            "user": USER,
            "identity_file": str(self.lan.key),
            "python": PYTHON,
            "options": {"UserKnownHostsFile": str(self.lan.known_hosts), "ConnectTimeout": "3"},
            **more,
        }

    def variables(self) -> dict[str, str]:
        state = {"XDG_STATE_HOME": str(self.home / "state"), "XDG_CONFIG_HOME": str(self.home / "config")}
        return {**os.environ, "PYTHONPATH": str(REPOSITORY), **state, **self.environment}

    def shoal(
        self, *arguments: str | Path, file: Path | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal`; the result is not checked."""
        command = [sys.executable, "-m", "infra.cli.main", *arguments, "-f", file or self.config]
        return subprocess.run(
            [str(each) for each in command],
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.home,
        )

    def document(self, *arguments: str | Path, file: Path | None = None, timeout_s: float = 120.0) -> Any:
        """What a command prints with `--json`; it must work."""
        done = self.shoal(*arguments, "--json", file=file, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refusal(self, cluster: Mapping[str, Any], **more: Any) -> list[str]:
        """What `up` says last when it does not work; nothing is left of it."""
        self.write(cluster, **more)
        done = self.shoal("up")
        assert done.returncode != 0, done.stdout
        assert "Traceback" not in done.stderr
        assert not (self.home / "state/shoal/lab").exists()
        told: Sequence[str] = done.stderr.splitlines()
        return [line for line in told if not line.startswith(("looking at", "starting"))]
