"""Hosts by SSH, from a machine that is none of them; they share one directory and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import Lan
from tests import waiting
from tests.lans import SHARE, needs_hosts
from tests.ssh_hosts import USER, SshCaller, furnish, python_on

pytestmark = [needs_hosts, pytest.mark.timeout(300)]

STORAGE = {"storage": f"{SHARE}/shoal"}
HELLO = """
import socket
print("hello from", socket.gethostname(), open("words.txt").read())
"""
JOB = {"task": "script", "script": "hello.py", "workers": {"min": 1, "max": 1}}
SYSTEMCTL = "#!/bin/sh\ntest \"$*\" = '--user show-environment'\n"
SYSTEMD_RUN = """#!/bin/sh
echo "$@" >> ~/asked
variables=
while :; do
    case $1 in
        -pStandardOutput=append:*) log=${1#*append:};;
        -E*) name=${1#-E}; eval "variables=\\"$variables $name=\\$$name\\"";;
        -*) ;;
        *) break;;
    esac
    shift
done
cd /; setsid env -i $variables "$@" >> "$log" 2>&1 < /dev/null &
"""
"""As systemd does: a process of its own, with those variables of the caller's that are named."""
WAIT_S = 60.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    directory = tmp_path_factory.mktemp("ssh")
    share = directory / "share"
    share.mkdir()
    share.chmod(0o777)
    with Lan(["head", "gpu-1", "gpu-2"], directory, shared={SHARE: share}, users=[USER]) as lan:
        furnish(lan)
        yield lan


@pytest.fixture
def caller(lan: Lan, tmp_path: Path) -> SshCaller:
    return SshCaller(lan, tmp_path / "caller")


@contextmanager
def ends_on(lan: Lan, after: str) -> Iterator[None]:
    """Tell what goes on there, where a wait for its end is in vain."""
    try:
        yield
    except AssertionError:
        for host in lan.hosts:
            print(after, host.name, [" ".join(command)[:200] for _, command in host.commands()])
        raise


def left_on(host: Host) -> set[str]:
    """What still runs on a host."""
    return host.names()


# -- what does not fit is told before anything starts ------------------------------------------------------


def test_whoever_is_not_let_in_is_told_why(caller: SshCaller, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with Lan(["stranger"], _made(other)) as strangers:
        key, strange = strangers.key, strangers.host("stranger").address
        told = caller.refusal({**STORAGE, "ssh": caller.ssh(identity_file=str(key), options=_known(caller))})
        assert len(told) == 3, "one sentence a host"
        assert told[0].startswith(f"head ({USER}@198.18.")
        assert "it takes none of our keys for this user (ssh.identity_file, ssh.user" in told[0]
        nodes = [{"name": "head", "host": strange}]
        (told_of_key,) = caller.refusal({**STORAGE, "nodes": nodes})
        assert "its host key is not known here: `ssh HOST` once shows it" in told_of_key
        known = tmp_path / "known_hosts"
        mine = caller.lan.known_hosts.read_text().split()
        known.write_text(f"{strange} {mine[1]} {mine[2]}\n")
        changed = {"options": {"UserKnownHostsFile": str(known)}}
        (told_of_change,) = caller.refusal({**STORAGE, "nodes": nodes, "ssh": caller.ssh(**changed)})
        assert "its host key is another than the one in known_hosts" in told_of_change
    (missing, *_) = caller.refusal({**STORAGE, "ssh": caller.ssh(identity_file="no-such-key")})
    assert missing.endswith(f"there is no key file {caller.home}/no-such-key")


def test_a_host_that_is_not_there_is_told(caller: SshCaller) -> None:
    head = caller.lan.hosts[0].address
    nowhere = head.rpartition(".")[0] + ".250"
    nodes = [
        {"name": "head", "host": head},
        {"name": "a", "host": nowhere},
        {"name": "b", "host": "no-such-host.invalid"},
        {"name": "c", "host": caller.lan.hosts[1].address, "port": 2222},
    ]
    told = caller.refusal({**STORAGE, "nodes": nodes})
    assert [line.partition(": ")[2] for line in told] == [
        "it does not answer",
        "there is no host of this name",
        "it answers, but no sshd listens there",
    ]


def test_a_host_with_another_software_is_told(caller: SshCaller) -> None:
    host = caller.lan.host("gpu-2")
    place = f"/home/{USER}/venv/bin/python"
    bare = f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 "$@"\n'
    python_on(host, source='#!/bin/sh\nexec /no/such/python "$@"\n')
    try:
        (told,) = caller.refusal(STORAGE)
        assert f"({USER}@{host.address}): ~/venv/bin/python cannot be run there" in told
        python_on(host, source=bare)
        without, *_ = caller.refusal(STORAGE)
        assert f"Shoal is not installed for {sys.base_prefix}/bin/python3" in without
        assert "ssh.install: wheel" in without
    finally:
        host.file(place).unlink()
        python_on(host)


def test_a_full_disk_is_told(caller: SshCaller) -> None:
    host, place = caller.lan.host("gpu-1"), f"/home/{USER}/temporary"
    bashrc = host.file(f"/home/{USER}/.bashrc")
    before = bashrc.read_text()
    bashrc.write_text(f"{before}export TMPDIR={place}\n")
    host.file(place).mkdir()
    try:
        assert host.run("mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", place).returncode == 0
        (full,) = caller.refusal(STORAGE)
        assert full.endswith(f"GiB free in {place}, where Ray keeps its files: it needs 1 GiB at least")
    finally:
        host.run("umount", place)
        bashrc.write_text(before)


@pytest.mark.slow
def test_a_storage_that_hosts_do_not_share_leaves_nothing_behind(caller: SshCaller) -> None:
    told = caller.refusal({"storage": "/root/of/somebody/else"})
    assert any("head cannot write under /root/of/somebody/else" in line for line in told), told
    assert [left_on(host) for host in caller.lan.hosts] == [set(), set(), set()]
    assert not [path for host in caller.lan.hosts for path in host.file("/tmp").glob("shoal-*/@*")]


@pytest.mark.slow
def test_a_start_that_is_interrupted_leaves_nothing(lan: Lan, caller: SshCaller) -> None:
    caller.write(STORAGE)
    command = [sys.executable, "-m", "infra.cli.main", "up", "-f", str(caller.config)]
    for last in ("starting Ray on gpu-1", "looking at 3 nodes"):
        process = subprocess.Popen(command, env=caller.variables(), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(last):
            assert line, "it ended before"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        process.stderr.close()
        with ends_on(lan, last):
            wait_for(lambda: not any(map(left_on, lan.hosts)), "something goes on")
        assert not (caller.home / "state/shoal").exists()


@pytest.mark.slow
def test_ports_that_are_taken_here_are_others(lan: Lan, caller: SshCaller) -> None:
    with socket.create_server(("127.0.0.1", 8265)):
        caller.write({**STORAGE, "nodes": [{"name": "head", "host": lan.hosts[0].address, "cpus": 1}]})
        document = caller.document("up")
        assert document["dashboard_url"] != "http://127.0.0.1:8265"
        assert document["dashboard_url"] == caller.document("status")["dashboard_url"]
        assert f"RAY_API_SERVER_ADDRESS={document['dashboard_url']}\n" in caller.shoal("env").stdout
        there = httpx.get(f"{document['dashboard_url']}/api/version", trust_env=False)
        assert there.status_code == 401, "Ray asks for its token"
        assert caller.shoal("down").returncode == 0


# -- a cluster ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def up(lan: Lan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshCaller]:
    """A cluster on all three, and a job of its caller's."""
    caller = SshCaller(lan, tmp_path_factory.mktemp("caller"))
    (caller.home / "hello.py").write_text(HELLO)
    (caller.home / "words.txt").write_text("with words")
    caller.write(STORAGE, train_jobs={"hello": JOB})
    began = time.monotonic()
    document = caller.document("up")
    print(f"up on three hosts: {time.monotonic() - began:.1f} s")
    assert [node["name"] for node in document["nodes"]] == ["head", "gpu-1", "gpu-2"]
    assert [node["resources"].get("CPU", 0) for node in document["nodes"]] == [0, 2, 3]
    yield caller
    caller.shoal("down")


def nodes(caller: SshCaller) -> dict[str, bool]:
    return {node["name"]: node["alive"] for node in caller.document("status")["nodes"]}


@pytest.mark.slow
def test_a_job_goes_there_with_its_folder_and_is_seen_from_here(up: SshCaller) -> None:
    began = time.monotonic()
    assert all(nodes(up).values())
    print(f"status: {time.monotonic() - began:.2f} s")
    done = up.shoal("train", "hello")
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("hello from")]
    assert said in ("hello from gpu-1 with words", "hello from gpu-2 with words")
    assert said in up.shoal("logs", "hello").stdout
    (job,) = up.document("jobs")
    assert job["status"] == "succeeded"
    up.write({**STORAGE, "sharing": {"settle_s": 1}}, train_jobs={"hello": JOB})
    again = up.shoal("up", "--json")
    assert "the cluster section of the config has changed; `shoal down` and" in again.stderr
    assert json.loads(again.stdout)["jobs"][0]["job"] == job["job"], "up again finds it up"


@pytest.mark.slow
def test_tools_of_others_work_from_here(up: SshCaller) -> None:
    exports = dict(line.removeprefix("export ").split("=", 1) for line in up.shoal("env").stdout.splitlines())
    assert "RAY_ADDRESS" not in exports, "this machine cannot join"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in exports.items():
            patch.setenv(name, value)
        from ray.job_submission import JobSubmissionClient

        from cluster.ray_private import read_credentials_again

        read_credentials_again()
        jobs = JobSubmissionClient(exports["RAY_API_SERVER_ADDRESS"]).list_jobs()
    read_credentials_again()
    assert any((job.submission_id or "").startswith("hello-") for job in jobs)


@pytest.mark.slow
def test_a_node_is_looked_into_from_here(up: SshCaller) -> None:
    assert up.shoal("ssh", "gpu-2", "hostname").stdout.splitlines()[-1] == "gpu-2"
    failed = up.shoal("ssh", "gpu-1", "sh", "-c", "echo 'two  words'; exit 7")
    assert (failed.returncode, failed.stdout.splitlines()[-1]) == (7, "two  words")
    unknown = up.shoal("ssh", "gpu-9")
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "cluster lab has no node 'gpu-9'; it has: head, gpu-1, gpu-2\n",
    )
    logs = up.shoal("logs", "--node", "gpu-1", "raylet.out", "--tail", "3", "--json")
    assert [json.loads(line)["file"] for line in logs.stdout.splitlines()] == ["raylet.out"] * 3
    assert logs.stderr == "", "the cluster itself has told it"
    no_log = up.shoal("logs", "--node", "gpu-1", "nothing.out")
    assert (no_log.returncode, "'nothing.out' is no file of Ray's" in no_log.stderr) == (2, True)


@pytest.mark.slow
def test_two_clusters_share_hosts(up: SshCaller, caller: SshCaller) -> None:
    caller.write({"storage": f"{SHARE}/other", "name": "other"}, train_jobs={"hello": JOB})
    for name in ("hello.py", "words.txt"):
        (caller.home / name).write_text((up.home / name).read_text())
    caller.document("up")
    try:
        with ThreadPoolExecutor(2) as both:
            done = list(both.map(lambda each: each.shoal("train", "hello"), (up, caller)))
        assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
        assert all(nodes(up).values())
        assert all(nodes(caller).values())
    finally:
        assert caller.shoal("down").returncode == 0
    assert all(nodes(up).values()), "the other one has ended alone"


@pytest.mark.slow
def test_a_host_that_was_rebooted_is_used_again(up: SshCaller) -> None:
    host = up.lan.host("gpu-2")
    host.cut_power()
    wait_for(lambda: not nodes(up)["gpu-2"], "Ray does not notice that the host is gone")
    (at_host,) = {line[:6] for line in up.shoal("logs", "--node", "gpu-1", "node.log").stdout.splitlines()}
    assert at_host == "[node.", "what Ray does not know of is asked of the host itself"
    began = time.monotonic()
    without = up.shoal("up")
    assert without.returncode == 0, without.stderr
    words = f"gpu-2 ({USER}@{host.address})"
    assert f"{words}: it does not answer; the cluster does without it" in without.stderr
    assert time.monotonic() - began < 45
    host.boot()
    again = up.shoal("up")
    assert f"{words} did not run; it does now" in again.stderr
    assert all(nodes(up).values())


@pytest.mark.slow
def test_a_head_that_was_rebooted_begins_anew(up: SshCaller) -> None:
    host = up.lan.hosts[0]
    before = up.document("jobs")
    host.cut_power()
    silent = up.shoal("status")
    assert silent.returncode == 1
    assert f"head ({USER}@{host.address}): it does not answer" in silent.stderr
    refused = up.shoal("up")
    assert (refused.returncode, refused.stdout) == (1, "")
    host.boot()
    again = up.shoal("up")
    assert again.returncode == 0, again.stderr
    assert "its head did not run: all nodes are started anew" in again.stderr
    assert nodes(up) == {"head": True, "gpu-1": True, "gpu-2": True}
    assert up.document("jobs") == before, "what is in the storage is still there"


@pytest.mark.slow
def test_a_connection_that_was_lost_is_made_again(up: SshCaller) -> None:
    from cluster.hosts.ssh.ssh_connection import sockets_directory

    status = up.document("status")
    masters = [path for path in sockets_directory().iterdir() if path.suffix != ".api"]
    ssh = ["ssh", "-O", "check", up.lan.hosts[0].address]
    asked = [subprocess.run([*ssh, "-S", path], capture_output=True, text=True).stderr for path in masters]
    pids = [int(found[1]) for said in asked if (found := re.search(r"pid=(\d+)", said))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    again = up.document("status")
    assert pids
    assert again["nodes"] == status["nodes"]
    assert httpx.get(f"{again['dashboard_url']}/api/version", trust_env=False).status_code == 401


@pytest.mark.slow
def test_down_ends_all_of_it_though_a_supervisor_was_killed_and_a_host_is_away(up: SshCaller) -> None:
    gpu, away = up.lan.host("gpu-1"), up.lan.host("gpu-2")
    (supervisor,) = [
        each for each, command in gpu.commands() if "cluster.hosts.on_host.supervisor" in command
    ]
    os.kill(supervisor.pid, signal.SIGKILL)
    assert "raylet" in left_on(gpu), "Ray has outlived it"
    up.lan.network.unplug(3)
    done = up.shoal("down")
    up.lan.network.plug(3)
    assert done.returncode == 0, done.stderr
    assert "what runs there ends by itself, since its head is gone" in done.stderr
    assert done.stdout == "cluster lab is down\n"
    for host in (up.lan.hosts[0], gpu):
        assert left_on(host) == set()
        assert not list(host.file("/tmp").glob("shoal-*/@*"))
    assert not (up.home / "state/shoal").exists()
    assert up.shoal("status").returncode == 1
    wait_for(lambda: left_on(away) == set(), "what runs on a host without its head does not end")


@pytest.mark.slow
def test_down_ends_all_of_it(lan: Lan, up: SshCaller) -> None:
    up.document("up")  # it may be down by now
    done = up.shoal("down")
    assert (done.returncode, done.stdout) == (0, "cluster lab is down\n"), done.stderr
    assert [left_on(host) for host in lan.hosts] == [set(), set(), set()]
    assert not [path for host in lan.hosts for path in host.file("/tmp").glob("shoal-*/@*")]
    assert not (up.home / "state/shoal").exists()
    assert up.shoal("status").returncode == 1


@pytest.mark.slow
def test_a_host_with_systemd_starts_it_as_a_service_of_its_user(lan: Lan, caller: SshCaller) -> None:
    """With doubles of its tools, since there is no systemd here that serves users."""
    host = lan.hosts[0]
    for name, source in {"systemctl": SYSTEMCTL, "systemd-run": SYSTEMD_RUN}.items():
        python_on(host, f"/home/{USER}/bin/{name}", source)
    bashrc = host.file(f"/home/{USER}/.bashrc")
    before = bashrc.read_text()
    bashrc.write_text(f"{before}export PATH=~/bin:$PATH\n")
    try:
        caller.write({**STORAGE, "nodes": [{"name": "head", "host": host.address, "cpus": 1}]})
        caller.document("up")
        (asked,) = host.file(f"/home/{USER}/asked").read_text().splitlines()
        assert asked.startswith("--user --quiet --collect --unit=shoal-lab-")
        assert "-EPATH" in asked.split()
        assert " -m cluster.hosts.on_host.supervisor /" in asked
        assert caller.shoal("down").returncode == 0
        host.file(f"/home/{USER}/bin/systemd-run").write_text("#!/bin/sh\nexit 1\n")
        caller.document("up")  # by itself where it is refused
        assert caller.shoal("down").returncode == 0
        assert left_on(host) == set()
    finally:
        bashrc.write_text(before)
        caller.shoal("down")


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _known(caller: SshCaller) -> dict[str, str]:
    # The agent's keys and those in the home must not help.
    return {"UserKnownHostsFile": str(caller.lan.known_hosts), "IdentitiesOnly": "yes"}
