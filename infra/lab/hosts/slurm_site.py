"""Slurm on hosts of their own: a login host with the controller, and nodes that run what is submitted."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from cluster.errors import ShoalError
from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import Lan

_NEEDED = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
}
START_S = 30.0
_LOOK_S = 0.2
_CONTROL_GROUPS = Path("/sys/fs/cgroup/freezer")
_KEY_BYTES = 64


def missing() -> str | None:
    """Why there can be no Slurm here, where there can be hosts; None where there can."""
    for program, package in _NEEDED.items():
        if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            return f"there is no `{program}` ({package}) to make a site with Slurm"
    return None


class SlurmSite:
    """Slurm on a network, as long as a `with` lasts: the first host is where people log in.

    Args:
        lan: has users, whose homes all hosts share.
        cpus: of each node, as Slurm is to take them; one number for all, or one for each.
        settings: lines of slurm.conf, beside those that make it run here.
        partitions: what is said of each, by name; all have all nodes, and the first is the default.
    """

    def __init__(
        self,
        lan: Lan,
        cpus: int | Sequence[int],
        settings: Mapping[str, str] | None = None,
        partitions: Mapping[str, str] | None = None,
    ) -> None:
        self._lan = lan
        self._cpus = cpus
        self._settings = dict(settings or {})
        self._partitions = dict(partitions or {"main": ""})
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        for host in self._lan.hosts:
            self._furnish(host)
            self._start_munge(host)
        with ExitStack() as ends:
            self._start(self.login, "slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            self._until_idle()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def login(self) -> Host:
        """Where people log in."""
        return self._lan.hosts[0]

    @property
    def nodes(self) -> list[Host]:
        """The others."""
        return self._lan.hosts[1:]

    def boot_node(self, node: Host) -> None:
        """Start a node whose power was cut, with its part of Slurm."""
        node.boot()
        self._start_munge(node)
        self.start_node(node)

    def start_node(self, node: Host) -> None:
        """Start Slurm's part of a node."""
        self._start(node, "slurmd", "-D", "-N", node.name)

    def _until_idle(self) -> None:
        deadline, pause = time.monotonic() + START_S, threading.Event()
        while True:
            # Of one partition: a node is listed once for each.
            asked = f"--partition={next(iter(self._partitions))}"
            states = self.login.run("sinfo", "--noheader", "--Node", asked, "--format=%T").stdout.split()
            if states == ["idle"] * len(self.nodes):
                return
            if time.monotonic() > deadline:
                raise ShoalError(f"Slurm's nodes did not come up within {START_S:.0f} s: {states}")
            pause.wait(_LOOK_S)

    def _start(self, host: Host, program: str, *arguments: str) -> None:
        with host.file(f"/var/log/{program}.log").open("ab") as log:
            host.start(f"/usr/sbin/{program}", *arguments, output=log)

    def _start_munge(self, host: Host) -> None:
        steps = (
            "mkdir -p /run/munge /var/lib/munge /var/log/munge",
            "chown munge /run/munge /var/lib/munge /var/log/munge /etc/munge /etc/munge/munge.key",
            "chmod 755 /run/munge",
            "chmod 700 /etc/munge",
            "chmod 400 /etc/munge/munge.key",
            "exec setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged",
        )
        done = host.run("sh", "-euc", "\n".join(steps))
        if done.returncode != 0:
            raise ShoalError(f"munge does not start on {host.name}: {done.stderr}")

    def _furnish(self, host: Host) -> None:
        host.file("/etc/munge").mkdir(exist_ok=True)
        host.file("/etc/munge/munge.key").write_bytes(self._key)
        host.file("/etc/slurm").mkdir(exist_ok=True)
        host.file("/etc/slurm/slurm.conf").write_text(self._configuration())
        host.file("/etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        host.file("/etc/slurm/gres.conf").write_text("")
        for directory in ("/var/spool/slurmctld", "/var/spool/slurmd"):
            host.file(directory).mkdir(exist_ok=True)

    def _configuration(self) -> str:
        # As sites have it: signals go to what Slurm has started, and not to all that this has started.
        tracked = "proctrack/cgroup" if _CONTROL_GROUPS.is_dir() else "proctrack/pgid"
        settings = {
            "ClusterName": "site",
            "SlurmctldHost": self.login.name,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "StateSaveLocation": "/var/spool/slurmctld",
            "SlurmdSpoolDir": "/var/spool/slurmd",
            "SlurmctldPidFile": "/run/slurmctld.pid",
            "SlurmdPidFile": "/run/slurmd.pid",
            "ProctrackType": tracked,
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": "2",
            "MpiDefault": "none",
            "SlurmdTimeout": "10",
            "SchedulerParameters": "sched_min_interval=100000",
            **self._settings,
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        each = [self._cpus] * len(self.nodes) if isinstance(self._cpus, int) else self._cpus
        lines += [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus} RealMemory=4000 State=UNKNOWN"
            for node, cpus in zip(self.nodes, each, strict=True)
        ]
        shared = "Nodes=ALL MaxTime=INFINITE OverSubscribe=NO State=UP"
        for place, (name, said) in enumerate(self._partitions.items()):
            lines.append(f"PartitionName={name} Default={'NO' if place else 'YES'} {shared} {said}")
        return "\n".join(lines) + "\n"
