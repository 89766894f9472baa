"""The control API of a running cluster: it comes back, and who asks it loads no Ray."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infra.api.access import own_token
from tests.clusters import REPOSITORY, LiveCluster, caller_environment
from tests.pace import USUAL_S, at_most

LOADS_NO_RAY = """
import sys
from infra.cli.main import call
code = call(sys.argv[1:])
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "torch", "pyarrow", "transformers"})
print("loaded:", *heavy, file=sys.stderr)
sys.exit(code)
"""


def api_processes(cluster: LiveCluster) -> list[psutil.Process]:
    """Those that serve it on this machine, for this cluster."""
    port = cluster.record.api_port
    return [
        process
        for process in psutil.process_iter()
        if any(
            end.laddr and end.laddr.port == port and end.laddr.ip == cluster.record.api_host
            for end in _listening(process)
        )
    ]


def _listening(process: psutil.Process) -> list[psutil._ntuples.pconn]:
    try:
        return [end for end in process.net_connections("tcp") if end.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def test_it_comes_back_when_it_is_killed_and_lets_the_same_people_in(running_cluster: LiveCluster) -> None:
    made = running_cluster.shoal("token", "ann", "--role", "read", "--json")
    assert made.returncode == 0, made.stderr
    (process,) = api_processes(running_cluster)
    process.kill()
    began = time.monotonic()
    done = running_cluster.shoal("status", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["nodes"]) == 3
    print(f"it answered again {time.monotonic() - began:.1f} s after SIGKILL")
    rows = json.loads(running_cluster.shoal("tokens", "--json").stdout)
    assert [(row["name"], row["role"], row["created_by"]) for row in rows] == [("ann", "read", "up")]
    again = running_cluster.shoal("up")
    assert again.returncode == 0, again.stderr
    assert len(api_processes(running_cluster)) == 1
    assert running_cluster.shoal("token", "ann", "--revoke").returncode == 0


def test_the_pages_own_command_works(running_cluster: LiveCluster, tmp_path: Path) -> None:
    page = (REPOSITORY / "infra" / "api" / "README.md").read_text()
    (command,) = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    made = running_cluster.shoal("token", "curl", "--role", "read")
    (tmp_path / "ann.token").write_text(made.stdout)
    variables = {**caller_environment(), "SHOAL_API_URL": running_cluster.record.api_url}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(running_cluster.shoal("jobs", "--json").stdout)
    assert running_cluster.shoal("token", "curl", "--revoke").returncode == 0


@pytest.mark.parametrize(
    "command",
    [("status",), ("jobs",), ("models",), ("tokens",), ("audit",), ("use",), ("explain", "x"), ("logs", "x")],
    ids=" ".join,
)
def test_who_asks_loads_nothing_heavy(command: tuple[str, ...], running_cluster: LiveCluster) -> None:
    config = [] if command == ("use",) else ["-f", str(running_cluster.config_path)]
    program = [sys.executable, "-c", LOADS_NO_RAY, *command, *config]
    done = subprocess.run(
        program, capture_output=True, text=True, env=caller_environment(), timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "loaded:", done.stderr


def test_status_takes_less_than_half_a_second(running_cluster: LiveCluster) -> None:
    times = []
    for _ in range(5):
        began = time.monotonic()
        assert running_cluster.shoal("status").returncode == 0
        times.append(time.monotonic() - began)
    print(f"shoal status: {statistics.median(times):.2f} s")
    # 0.26 s where nothing else runs; 1.4 s before it asked the API.
    assert at_most(min(times), 0.5 / USUAL_S)


def test_the_token_of_who_brought_it_up_follows_from_rays(running_cluster: LiveCluster) -> None:
    first, again = own_token(running_cluster.record), own_token(running_cluster.record)
    assert first == again
    assert len(first) > 40
