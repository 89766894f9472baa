"""A host's own part of a cluster: starting its node, looking after it, ending it.

python -m cluster.hosts.on_host.node start|stop|logs < a document
python -m cluster.hosts.on_host.node run CLUSTER ARGUMENT…
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.hosts.on_host.node_start import (
    LOCK_FILE,
    LOG_FILE,
    RAY,
    START_FILE,
    STATE,
    STATUS_FILE,
    NodeTask,
    node_directory,
    root_directory,
)
from cluster.hosts.on_host.result_line import answer
from cluster.hosts.processes import end_cluster
from cluster.state.health import wait_until
from cluster.state.record import TOKEN_FILE
from cluster.state.state_directory import require_private, write_private

START_S = 90.0
"""Longest that Ray may take to start."""
END_S = 30.0
_TAIL_LINES = 15
_SYSTEMD_S = 5.0
_USUAL_LOGS = ("raylet.out", "raylet.err")
_USUAL_LINES = 100
_PASSED_ON = ("PATH", "PYTHONPATH", "HOME", "TMPDIR")
"""What the supervisor has of the environment of whoever logs in; Ray has all of it."""


def start(task: NodeTask, token: str) -> dict[str, Any]:
    """Start a node, or find it running: {"was_up", "directory", "gcs_address", "state", "servers": ports}.

    Raises:
        ShoalError: it does not start; nothing of it is left.
    """
    directory = node_directory(task.cluster)
    if prepare(task, token, directory):
        return {"was_up": True, **_required(directory / START_FILE)["told"]}
    try:
        return {"was_up": False, **_launch(task, directory)}
    except BaseException:
        clear(directory)
        raise


def prepare(task: NodeTask, token: str, directory: Path) -> bool:
    """Write down what a supervisor needs to know; False. True where the node runs: then nothing happens.

    What was left there of one that does not run is ended.

    Raises:
        ShoalError: another cluster of this name has a node here.
    """
    known = read_document(directory / START_FILE)
    if known is not None and is_running(directory):
        if known["mark"] != task.mark:
            raise ShoalError(
                f"another cluster {task.cluster} has a node here, which {known['by']} has started: end that"
                " one, or give this one another cluster.name"
            )
        return True
    if directory.exists():
        clear(directory)
    for each in (root_directory(), directory):
        require_private(each)
    write_private(directory / TOKEN_FILE, token)
    known = {
        "mark": task.mark,
        "by": os.environ.get("USER", str(os.getuid())),
        "task": task.as_json(),
        "login": dict(os.environ),
    }
    write_private(directory / START_FILE, json.dumps(known))
    return False


def stop(cluster: str, mark: str) -> bool:
    """End a node with all that runs there, and remove what it had; whether there was one.

    Raises:
        ShoalError: something of it does not end.
    """
    directory = node_directory(cluster)
    known = read_document(directory / START_FILE)
    if known is None or known["mark"] != mark:
        return end_cluster(mark) > 0
    clear(directory)
    return True


def run(cluster: str, arguments: Sequence[str]) -> None:
    """Become Python with these arguments, in the environment of all that runs on the node: so its credentials
    are not to be seen in a list of processes.

    Raises:
        RequestError: there is no such node here.
    """
    environment = environment_of(node_directory(cluster))
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def environment_of(directory: Path) -> dict[str, str]:
    """The environment of all that runs on the node of this directory, with where commands keep what they know
    of its cluster.

    Raises:
        RequestError: there is no such node here.
    """
    known = read_document(directory / START_FILE)
    if known is None:
        raise RequestError(f"there is no node of cluster {directory.name.lstrip('@')} here")
    return {**known["environment"], "XDG_STATE_HOME": str(directory / STATE)}


def logs(cluster: str, file: str | None, tail: int | None) -> dict[str, Any]:
    """{"files": the names of all of them, "lines": [{"file", "line"}]}, of a node that runs or has ended.

    Args:
        file: one of them; None for those of the node's start and of its raylet.
        tail: so many lines of each, the last ones; None for all of the one that is named, and 100 of others.

    Raises:
        RequestError: there is no such node here, or no such file.
    """
    directory = node_directory(cluster)
    session = directory / RAY / "session_latest" / "logs"
    if not directory.exists():
        raise RequestError(f"there is no node of cluster {cluster} here")
    files = {path.name: path for path in sorted(session.glob("*")) if path.is_file()}
    files[LOG_FILE] = directory / LOG_FILE
    if file is not None and file not in files:
        raise RequestError(f"{file!r} is no file of Ray's here; those are {', '.join(list(files)[:50])}")
    wanted = [file] if file is not None else [name for name in (LOG_FILE, *_USUAL_LOGS) if name in files]
    most = tail if tail is not None or file is not None else _USUAL_LINES
    lines = []
    for name in wanted:
        said = files[name].read_text(encoding="utf-8", errors="replace").splitlines()
        lines += [
            {"file": name, "line": line}
            for line in (said if most is None else said[len(said) - min(most, len(said)) :])
        ]
    return {"files": list(files), "lines": lines}


def is_running(directory: Path) -> bool:
    """Whether the node of this directory runs: whether its supervisor does."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def clear(directory: Path) -> None:
    """End what runs for a directory, and remove it.

    Raises:
        ShoalError: something does not end.
    """
    status = read_document(directory / STATUS_FILE)
    known = read_document(directory / START_FILE)
    if is_running(directory) and status is not None:
        os.kill(status["supervisor"], signal.SIGTERM)
        if not wait_until(lambda: not is_running(directory), END_S):
            raise ShoalError(f"the supervisor of the node in {directory} does not end")
    if known is not None:
        end_cluster(known["mark"])  # what has outlived its supervisor
    shutil.rmtree(directory)


def _launch(task: NodeTask, directory: Path) -> dict[str, Any]:
    supervisor = [sys.executable, "-m", "cluster.hosts.on_host.supervisor", str(directory)]
    _detach(supervisor, f"shoal-{task.cluster}-{task.mark[:8]}", directory / LOG_FILE)

    def settled() -> bool:
        status = read_document(directory / STATUS_FILE)
        return status is not None and status["state"] != "starting"

    if not wait_until(settled, START_S):
        raise ShoalError(f"Ray did not start within {START_S:.0f} s; it said last:\n{tail(directory)}")
    status = read_document(directory / STATUS_FILE)
    if status is not None and status["refused"] is not None:
        raise RequestError(status["refused"])
    if status is None or status["state"] != "up":
        raise ShoalError(f"Ray did not start; it said last:\n{tail(directory)}")
    told: dict[str, Any] = _required(directory / START_FILE)["told"]
    return told


def _detach(command: list[str], unit: str, log: Path) -> None:
    """Start what is to outlive the connection, by the user's systemd where there is one: with it a service
    is no part of the session, and is not ended when that is."""
    with log.open("ab") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        if _has_systemd():
            properties = [f"-pStandardOutput=append:{log}", f"-pStandardError=append:{log}"]
            variables = [f"-E{name}" for name in _PASSED_ON if name in os.environ]
            run = ["systemd-run", "--user", "--quiet", "--collect", f"--unit={unit}", *properties, *variables]
            if subprocess.run([*run, *command], check=False, **streams).returncode == 0:
                return
        subprocess.Popen(command, start_new_session=True, **streams)


def _has_systemd() -> bool:
    asked = ["systemctl", "--user", "show-environment"]
    try:
        return subprocess.run(asked, capture_output=True, timeout=_SYSTEMD_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def tail(directory: Path) -> str:
    """The last of what a node's start has said."""
    try:
        lines = (directory / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    shown = [f"  {line}" for line in lines if line.strip()][-_TAIL_LINES:]
    return "\n".join(shown) or "  (nothing)"


def _required(path: Path) -> dict[str, Any]:
    found = read_document(path)
    assert found is not None, "its supervisor is up"
    return found


def read_document(path: Path) -> dict[str, Any] | None:
    """What a file of the node's directory says; None where it is not there, or not whole."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found


def main(arguments: list[str]) -> None:
    """What is asked, on standard input or by the arguments."""
    what, *further = arguments
    try:
        if what == "run":
            run(further[0], further[1:])
        document: Mapping[str, Any] = json.load(sys.stdin)
        if what == "start":
            result: Any = start(NodeTask(**document["task"]), document["token"])
        elif what == "logs":
            result = logs(document["cluster"], document["file"], document["tail"])
        else:
            result = stop(document["cluster"], document["mark"])
    except ShoalError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    answer(result)


if __name__ == "__main__":
    main(sys.argv[1:])
