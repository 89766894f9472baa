"""Real clusters for tests: started and stopped by the command line, as people do it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster.hosts.embedded.session_directory import session_directory
from cluster.state.connection import ClusterRecord, environment, read_record
from cluster.state.state_directory import state_directory

REPOSITORY = Path(__file__).parent.parent
COMMAND_TIMEOUT_S = 120.0

HEAD_AND_TWO = (
    "nodes: [{name: head, cpus: 0}, {name: worker, count: 2, cpus: 2}]",
    "storage: ./storage",
    "sharing: {avoid_after: 0}",  # tests kill what they like, and others go on with what is left
)


@dataclass(frozen=True)
class LiveCluster:
    """A cluster that is up.

    `environment` is a whole environment for subprocesses, in which Ray's own tools work against it.
    """

    record: ClusterRecord
    config_path: Path
    environment: dict[str, str] = field(repr=False)

    def shoal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal` against it; the result is not checked."""
        return shoal(*arguments, "-f", str(self.config_path))

    def python(self, source: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run a program under its environment; the result is not checked."""
        return subprocess.run(
            [sys.executable, "-c", source],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.config_path.parent,
        )

    @contextmanager
    def running(self, source: str, said: str) -> Iterator[None]:
        """Run a program under its environment, from when it says `said` until its standard input ends."""
        program = subprocess.Popen(
            [sys.executable, "-c", source],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert program.stdout is not None
            assert program.stdout.readline().strip() == said
            yield
        finally:
            program.communicate(timeout=30)

    def processes(self, title: str) -> list[psutil.Process]:
        """Its live processes with `title` in their command line."""
        found = []
        for process in marked_processes(self.record.cluster_id):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def raylet(self, node: str) -> psutil.Process:
        """The raylet of the node of this name."""
        (ip,) = [each.ip for each in self.record.nodes if each.name == node]
        (raylet,) = [each for each in self.processes(f"--node_ip_address={ip}") if each.name() == "raylet"]
        return raylet


def unique_name() -> str:
    """A cluster name that no other run of the tests has."""
    return f"t{uuid.uuid4().hex[:8]}"


def write_config(directory: Path, name: str, *cluster_lines: str) -> Path:
    """A shoal.yaml with the lines under `cluster:`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "shoal.yaml"
    path.write_text("\n  ".join(["cluster:", f"name: {name}", *(cluster_lines or HEAD_AND_TWO)]) + "\n")
    return path


def caller_environment() -> dict[str, str]:
    """The environment of a person who has Shoal installed and whose shell points at no cluster."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SHOAL_"))}
    paths = [str(REPOSITORY), variables.get("PYTHONPATH", "")]
    return {**variables, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def shoal_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infra.cli.main", *arguments]


def shoal(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `shoal`, with more variables in its environment; the result is not checked."""
    return subprocess.run(
        shoal_command(*arguments),
        env={**caller_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


def up(config_path: Path, name: str) -> LiveCluster:
    """Start the cluster of a config file."""
    done = shoal("up", "-f", str(config_path))
    assert done.returncode == 0, done.stderr
    return live(config_path, name)


def live(config_path: Path, name: str) -> LiveCluster:
    """The cluster of a config file, which was started."""
    record = read_record(name)
    assert record is not None
    return LiveCluster(record, config_path, {**caller_environment(), **environment(record)})


@contextmanager
def started(directory: Path, *cluster_lines: str) -> Iterator[LiveCluster]:
    """A cluster of its own, down at the end; nothing of it may be left then."""
    name = unique_name()
    config_path = write_config(directory, name, *cluster_lines)
    try:
        cluster = up(config_path, name)
        yield cluster
    finally:
        done = shoal("down", "-f", str(config_path))
    assert done.returncode == 0, done.stderr
    assert leftovers(cluster.record) == {}


def leftovers(record: ClusterRecord) -> dict[str, Any]:
    """What is there of a cluster: processes, sockets, files; empty when it is gone."""
    subnet = record.head_ip.rpartition(".")[0] + "."
    directory, session = state_directory(record.name), session_directory(record.name)
    lock = directory.with_name(f".{directory.name}.lock")
    listening = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    found = {
        "processes": [process.info for process in processes_of(record)],
        "sockets": [str(each.laddr) for each in listening if _is_in(each.laddr.ip, subnet)],
        "files": [str(path) for path in (directory, session, lock) if path.exists()],
    }
    return {what: items for what, items in found.items() if items}


def processes_of(record: ClusterRecord) -> list[psutil.Process]:
    """The live processes of a cluster: those that carry its mark, and those that use its files.

    Read without our own code; the second kind would show one that has lost its mark.
    """
    directories = [str(each(record.name)) for each in (state_directory, session_directory)]
    found = {process.pid: process for process in marked_processes(record.cluster_id)}
    for process in _live_processes():
        paths = [f"{path}/" for path in _open_paths(process.pid)]
        if any(path.startswith(f"{directory}/") for path in paths for directory in directories):
            found[process.pid] = process
    return list(found.values())


def marked_processes(cluster_id: str) -> list[psutil.Process]:
    """The live processes that carry a cluster's mark."""
    mark = f"SHOAL_CLUSTER_ID={cluster_id}".encode()
    found = []
    for process in _live_processes():
        with contextlib.suppress(OSError):  # it has ended
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended since."""
    live = {(process.pid, process.create_time()) for process in _live_processes()}
    return [process for process in processes if (process.pid, process.create_time()) in live]


def _live_processes() -> list[psutil.Process]:
    everything = psutil.process_iter(["pid", "name", "status"])
    return [process for process in everything if process.info["status"] != psutil.STATUS_ZOMBIE]


def _open_paths(pid: int) -> list[str]:
    """Where a process works and what files it has open."""
    paths = []
    with contextlib.suppress(OSError):  # it has ended
        for link in (f"/proc/{pid}/cwd", *(entry.path for entry in os.scandir(f"/proc/{pid}/fd"))):
            paths.append(os.readlink(link).removesuffix(" (deleted)"))
    return paths


def _is_in(address: str, subnet: str) -> bool:
    return address.removeprefix("::ffff:").startswith(subnet)
