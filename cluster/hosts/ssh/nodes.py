"""What is done on all hosts of a fleet, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import ShoalError
from cluster.hosts.on_host.node_start import NodeTask
from cluster.hosts.ssh import look as looking
from cluster.hosts.ssh.fleet import FleetHost
from cluster.hosts.ssh.ssh_connection import Connection, HostError
from cluster.version import version

AT_ONCE = 32
LOOK_S = 60.0
NODE_S = 150.0
LEAST_FREE_BYTES = 1024**3
"""Of disk, where Ray keeps what it spills and logs. (From 95 % on it starts nothing there.)"""
LEAST_PYTHON = (3, 11, 4)

Answer = TypeVar("Answer")
Facts = Mapping[str, Any]


def on_all(hosts: Sequence[FleetHost], ask: Callable[[FleetHost], Answer]) -> list[Answer | ShoalError]:
    """What each host answers, or why it does not, in their order."""

    def attempt(host: FleetHost) -> Answer | ShoalError:
        try:
            return ask(host)
        except ShoalError as error:
            return error

    if not hosts:
        return []
    with ThreadPoolExecutor(min(len(hosts), AT_ONCE)) as side_by_side:
        return list(side_by_side.map(attempt, hosts))


def require_all(answers: Sequence[Answer | ShoalError]) -> list[Answer]:
    """The answers.

    Raises:
        ShoalError: some did not; the sentences of all of them.
    """
    failed = [each for each in answers if isinstance(each, ShoalError)]
    if failed:
        error = HostError("\n".join(dict.fromkeys(map(str, failed))))
        error.exit_code = max(each.exit_code for each in failed)
        raise error
    return [each for each in answers if not isinstance(each, ShoalError)]


def look(host: FleetHost, *, head: bool = False) -> dict[str, Any]:
    """Facts of a host, see `look.look`.

    Raises:
        HostError: it does not answer, or has no such Python.
    """
    connection = Connection(host.destination, keep=head)
    connection.open()
    source = Path(looking.__file__).read_text(encoding="utf-8")
    program = [host.python, "-c", "import sys; exec(compile(sys.stdin.read(), 'look', 'exec'))"]
    found: dict[str, Any] = connection.ask(program, {}, f"{source}\n_ = ", LOOK_S)
    return found


def lacks(host: FleetHost, facts: Facts, head: Facts) -> list[str]:
    """Why Ray cannot be started on a host, a sentence each.

    Args:
        head: the facts of the head.
    """
    words, found = host.destination.words, tuple(facts["python"])
    try:
        require_python(host, facts)
    except HostError as error:
        return [str(error)]
    sentences = []
    theirs, ours = facts["versions"], version()
    if theirs.get("shoal") is None:
        sentences.append(
            f"{words}: Shoal is not installed for {facts['executable']}: install it there, or let"
            " ssh.install: wheel do that (ssh.python says which Python)"
        )
    elif theirs["shoal"] != ours:
        sentences.append(f"{words} has Shoal {theirs['shoal']}, and this machine {ours}: one version on all")
    if facts["python"][:2] != head["python"][:2]:
        sentences.append(
            f"{words} has Python {'.'.join(map(str, found))}, and the head"
            f" {'.'.join(map(str, head['python']))}: Ray needs one version on all hosts"
        )
    for name in ("ray", "torch"):
        if theirs.get(name) != head["versions"].get(name):
            sentences.append(
                f"{words} has {name} {theirs.get(name) or 'not installed'}, and the head"
                f" {head['versions'].get(name) or 'not installed'}: one version on all hosts"
            )
    return sentences + disk_lacks(host, facts)


def require_python(host: FleetHost, facts: Facts) -> None:
    """See that a host's Python is new enough.

    Raises:
        HostError: it is not.
    """
    found = tuple(facts["python"])
    if found < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        raise HostError(
            f"{host.destination.words}: {host.python} is Python {'.'.join(map(str, found))}; Shoal needs"
            f" {wanted} at least"
        )


def disk_lacks(host: FleetHost, facts: Facts) -> list[str]:
    """Why a host's disk does not do."""
    words, place = host.destination.words, facts["temporary"]
    if facts["unwritable"] is not None:
        return [f"{words}: nothing can be written in {place}: {facts['unwritable']}"]
    if facts["free_bytes"] < LEAST_FREE_BYTES:
        return [
            f"{words} has {facts['free_bytes'] / 2**30:.2f} GiB free in {place}, where Ray keeps its files:"
            f" it needs {LEAST_FREE_BYTES / 2**30:.0f} GiB at least"
        ]
    return []


def start(host: FleetHost, task: NodeTask, token: str) -> dict[str, Any]:
    """Start a host's node, or find it running; see `node.start`.

    Raises:
        HostError: it does not start; nothing of it is left there.
    """
    found: dict[str, Any] = _ask(host, "start", {"task": task.as_json(), "token": token})
    return found


def read_logs(host: FleetHost, cluster: str, file: str | None, tail: int | None) -> dict[str, Any]:
    """What Ray's processes on a host wrote, read there; see `node.logs`.

    Raises:
        HostError: the host does not answer, or has no such file.
    """
    found: dict[str, Any] = _ask(host, "logs", {"cluster": cluster, "file": file, "tail": tail})
    return found


def stop(host: FleetHost, cluster: str, mark: str) -> bool:
    """End a host's node with all that runs there; whether there was one.

    Raises:
        HostError: the host does not answer, or something does not end.
    """
    return bool(_ask(host, "stop", {"cluster": cluster, "mark": mark}))


def _ask(host: FleetHost, what: str, document: Mapping[str, Any]) -> Any:
    """Have a host do something with its node; see `node`."""
    connection = Connection(host.destination)
    connection.open()
    program = [host.python, "-m", "cluster.hosts.on_host.node", what]
    return connection.ask(program, document, timeout_s=NODE_S)
