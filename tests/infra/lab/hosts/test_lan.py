"""Hosts for real: what one of them has no other has, but for what they are told to share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import REPOSITORY, Lan, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SHARE = "/data/shared"
TALK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
connection, _ = server.accept()
connection.sendall(b"here")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    directory = tmp_path_factory.mktemp("lan")
    (directory / "share").mkdir()
    with Lan(["one", "two"], directory, shared={SHARE: directory / "share"}, users=["ada"]) as lan:
        yield lan


def said(lan: Lan, name: str, script: str, user: str = "root") -> str:
    done = lan.host(name).run("sh", "-c", script, user=user)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("place", ["/tmp", "/home", "/root", "/srv", "/var/tmp", "/dev/shm", "/run"])
def test_what_one_writes_no_other_sees(lan: Lan, place: str, tmp_path: Path) -> None:
    said(lan, "one", f"echo mine > {place}/of-one")
    assert said(lan, "one", f"cat {place}/of-one") == "mine"
    assert "of-one" not in said(lan, "two", f"ls -a {place}")
    assert not Path(place, "of-one").exists()
    assert str(tmp_path) not in said(lan, "two", f"ls -d {tmp_path} || true")


def test_each_has_a_name_processes_and_an_address_of_its_own(lan: Lan) -> None:
    for name in ("one", "two"):
        assert said(lan, name, "hostname") == name
        assert lan.host(name).address in said(lan, name, "ip -br addr show eth0")
    with subprocess.Popen(lan.host("one").command(["sleep", "61.7"])) as sleeper:
        assert "sleep 61.7" not in said(lan, "two", "ps -e -o args")
        while "sleep 61.7" not in said(lan, "one", "ps -e -o args"):
            threading.Event().wait(0.05)
        assert lan.host("one").names() == {"sleep"}
        sleeper.kill()


def test_a_process_that_ends_while_it_is_asked_is_left_out(lan: Lan, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "0"]) as child:
        ended = psutil.Process(child.pid)
    there = psutil.Process()
    monkeypatch.setattr(Host, "processes", lambda self: [ended, there])
    assert lan.host("one").commands() == [(there, there.cmdline())]
    assert lan.host("one").names() == {there.name()}


def test_an_actor_is_found_whatever_it_does_at_the_moment(lan: Lan) -> None:
    """Ray's title of a process is that of its actor, and of the method in it that is called."""
    busy = ["bash", "-c", "exec -a 'ray::Broker.grants' sleep 61.8"]
    with subprocess.Popen(lan.host("one").command(busy)) as sleeper:
        while lan.host("one").names() != {"sleep"}:  # what starts it has the words too
            threading.Event().wait(0.05)
        assert [each.name() for each in lan.host("one").running("ray::Broker")] == ["sleep"]
        assert lan.host("two").running("ray::Broker") == []
        sleeper.kill()


def test_what_is_installed_is_seen_and_cannot_be_changed(lan: Lan) -> None:
    for place in (REPOSITORY, sys.prefix, "/usr"):
        done = lan.host("one").run("touch", f"{place}/changed")
        assert "Read-only file system" in done.stderr
    program = "import ray, torch, cluster; print(cluster.__file__)"
    done = lan.host("one").run(sys.executable, "-c", program, environment={"PYTHONPATH": str(REPOSITORY)})
    assert done.stdout == f"{REPOSITORY}/cluster/__init__.py\n"


def test_what_is_shared_is_seen_by_all(lan: Lan) -> None:
    said(lan, "one", f"echo ours > {SHARE}/file")
    assert said(lan, "two", f"cat {SHARE}/file") == "ours"


def test_each_lets_in_who_has_the_key(lan: Lan) -> None:
    for user, name in (("root", "one"), ("ada", "two")):
        options = ["-i", lan.key, "-o", f"UserKnownHostsFile={lan.known_hosts}", "-o", "BatchMode=yes"]
        to = f"{user}@{lan.host(name).address}"
        done = subprocess.run(["ssh", *options, to, "hostname; whoami; pwd"], capture_output=True, text=True)
        home = "/root" if user == "root" else f"/home/{user}"
        assert done.stdout.split() == [name, user, home], done.stderr


def test_hosts_know_each_other_by_their_names(lan: Lan) -> None:
    program = "import socket; print(socket.gethostbyname('two'), socket.gethostbyname('one'))"
    assert said(lan, "one", f'{sys.executable} -c "{program}"').split() == [
        lan.host("two").address,
        "127.0.1.1",  # as Debian's installer has it
    ]


def test_a_name_that_nobody_knows_is_not_waited_for_however_often_one_asks(lan: Lan) -> None:
    """Nothing of it is limited, as the answers of another machine's kernel are."""
    ask = (
        "import socket, time\n"
        "began = time.monotonic()\n"
        "for each in range(100):\n"
        "    try:\n"
        "        socket.getaddrinfo(f'nobody-{each}', 80)\n"
        "    except socket.gaierror:\n"
        "        pass\n"
        "print(time.monotonic() - began)\n"
    )
    done = lan.host("one").run(sys.executable, "-c", ask)
    assert float(done.stdout) < 2.0


def test_a_loss_of_power_ends_everything_and_tells_nobody(lan: Lan) -> None:
    two = lan.host("two")
    said(lan, "two", "echo kept > /srv/file; echo lost > /dev/shm/file; echo lost > /run/file")
    talker = two.start(sys.executable, "-c", TALK, two.address, output=subprocess.PIPE)
    assert talker.stdout is not None
    assert talker.stdout.readline() == "ready\n"
    with socket.create_connection((two.address, 7), timeout=5) as connection:
        assert connection.recv(64) == b"here"
        running = two.processes()
        assert running
        two.cut_power()
        assert not any(each.is_running() for each in running)
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):  # no end of the stream, no reset
            connection.recv(64)
    talker.communicate(timeout=5)
    assert not two.is_up
    assert said(lan, "one", "hostname") == "one"
    two.boot()
    assert said(lan, "two", "cat /srv/file; ls /dev/shm /run/file 2>/dev/null || true") == "kept\n/dev/shm:"


def test_hosts_end_with_whoever_made_them(tmp_path: Path) -> None:
    """A test that is killed leaves no process behind."""
    source = (
        "import sys, time\nfrom pathlib import Path\nfrom infra.lab.hosts.lan import Lan\n"
        f"with Lan(['alone'], Path({str(tmp_path)!r})) as lan:\n"
        "    lan.hosts[0].run('sh', '-c', 'sleep 86.4 >/dev/null 2>&1 &')\n"
        "    print(lan.network.namespace(1), flush=True)\n    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    maker = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert maker.stdout is not None
    namespace = maker.stdout.readline().strip()
    found = psutil.process_iter(["cmdline"])
    sleeping = [each for each in found if (each.info["cmdline"] or [])[:2] == ["sleep", "86.4"]]
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=10)
    try:
        _, alive = psutil.wait_procs(sleeping, timeout=10)
        assert (len(sleeping), alive) == (1, [])
    finally:
        subprocess.run(["ip", "netns", "del", namespace], check=True)  # its cable goes with it
        subprocess.run(["ip", "link", "del", namespace.rpartition("-")[0]], check=True)
