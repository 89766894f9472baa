"""`ssh.install: wheel`: an environment with this very Shoal on a host."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.hosts.provider import Tell
from cluster.hosts.ssh import environment_maker
from cluster.hosts.ssh.fleet import FleetHost
from cluster.hosts.ssh.ssh_connection import Connection
from cluster.hosts.ssh.wheel import PROJECT, this_wheel, versions_here

INSTALL_S = 1800.0
"""Longest: torch for GPUs is several GB."""


def install(host: FleetHost, tell: Tell) -> FleetHost:
    """Have the environment on a host, which has a Python that is new enough; the host with its interpreter.

    Raises:
        HostError: it cannot be made; nothing of it is left.
    """
    wheel = this_wheel()
    version = wheel.file_name.split("-")[1]
    asked: Mapping[str, Any] = {
        "name": f"{PROJECT}-{version}-{wheel.digest[:12]}",
        "wheel": wheel.file_name,
        "content": base64.b64encode(wheel.content).decode(),
        "constraints": versions_here(),
    }
    maker = Path(environment_maker.__file__).read_text(encoding="utf-8")
    source = f"ASKED = {json.dumps(json.dumps(asked))}\n{maker}"
    program = [host.python, "-c", "import sys; exec(compile(sys.stdin.read(), 'install', 'exec'))"]
    tell(f"{host.destination.words}: installing {wheel.file_name}, unless it is there")
    found = Connection(host.destination).ask(program, {}, f"{source}\n_ = ", INSTALL_S)
    return replace(host, python=found["python"])
