"""The processes that serve, and what each takes of the machine; for the benchmarks of serving."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from tests.serve_apps.driver import Driver

GENERATOR = "generator"
"""The process of the benchmark, which makes the load."""


@dataclass(frozen=True)
class ServingProcess:
    """One process of the cluster: what it is, and of which app."""

    role: str
    """gateway, thin_replica (as Serve has it), replica (its engine's rank 0), rank (the others),
    serve_controller, apps_controller."""
    app: str
    """Empty where it belongs to no single app."""
    pid: int


def _alive() -> list[ServingProcess]:
    """In the process of a driver: the actors of Serve and of Shoal's serving."""
    from ray.util.state import list_actors

    from serve_apps.spec import CONTROLLER

    found = []
    for row in list_actors(filters=[("state", "=", "ALIVE")], limit=1000, detail=True):
        kind, _, rest = (row.name or "").partition("::")
        app = rest.partition("#")[0].partition(":")[0]
        if kind == "SERVE_REPLICA":
            found.append(ServingProcess("gateway" if app == "gateway" else "thin_replica", app, row.pid))
        elif kind == "SERVE_CONTROLLER_ACTOR":
            found.append(ServingProcess("serve_controller", "", row.pid))
        elif kind == CONTROLLER:
            found.append(ServingProcess("apps_controller", "", row.pid))
    return found + _engines()


def _engines() -> list[ServingProcess]:
    """The ranks of engines: rank 0 is what does the work of a replica."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        kind, named, title = " ".join(process.info["cmdline"] or ()).strip().partition("shoal::Engine:")
        if named and not kind:
            app, _, rank = title.split(":")
            found.append(ServingProcess("replica" if rank == "rank 0" else "rank", app, process.pid))
    return found


def serving_processes(call: Driver) -> list[ServingProcess]:
    """What serves on a driver's cluster now."""
    return call(_alive)


class CpuShares:
    """How many cores processes keep busy, from when it is made.

    >>> shares = CpuShares([])
    >>> sorted(shares.cores())
    ['generator', 'others']
    """

    def __init__(self, processes: Iterable[ServingProcess]) -> None:
        self._processes = [(each.role, psutil.Process(each.pid)) for each in processes]
        self._processes.append((GENERATOR, psutil.Process(os.getpid())))
        self._began = time.perf_counter()
        self._before = [_used_s(process) for _, process in self._processes]
        self._machine = _machine_s()

    def cores(self) -> dict[str, float]:
        """By role the cores since then; `others` is whatever else has run on the machine."""
        seconds = time.perf_counter() - self._began
        busy = (_machine_s() - self._machine) / seconds
        shares: dict[str, float] = {}
        for (role, process), before in zip(self._processes, self._before, strict=True):
            shares[role] = shares.get(role, 0.0) + max(0.0, _used_s(process) - before) / seconds
        return {**shares, "others": max(0.0, busy - sum(shares.values()))}


def _used_s(process: psutil.Process) -> float:
    """Processor seconds of a process and of its children that have ended; 0 of one that has ended itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _machine_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def told(shares: Mapping[str, float]) -> str:
    """Shares in a line for people."""
    return ", ".join(f"{role} {cores:.2f}" for role, cores in shares.items())
