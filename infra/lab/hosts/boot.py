"""The first program of a host: it builds the host's file systems, starts sshd, and stays.

It runs in namespaces of its own (mounts, processes, name, IPC, network). Of this machine's disk a host sees
the system and what is installed, and cannot write there; everything else is its own, and lies in its `disk`,
which a loss of power leaves as it is, but for /run and /dev/shm, which are memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

SYSTEM = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "opt")
OWN = {"etc": 0o755, "home": 0o755, "mnt": 0o755, "root": 0o711, "srv": 0o755, "tmp": 0o1777, "var": 0o755}
"""The interpreter may lie below /root, and is everybody's."""
_OF_VAR = {"cache": 0o755, "lib": 0o755, "log": 0o755, "spool": 0o755, "tmp": 0o1777}
READY = "the host is up"


@dataclass(frozen=True)
class Build:
    """What a host is made of.

    Attributes:
        disk: a directory of this machine, the host's own.
        names: addresses by name, of all hosts.
        software: directories of this machine that it sees, and cannot change.
        shared: (place on the host, directory of this machine), which it can: as a file server's are.
        users: (name, number) of people beside root.
        authorized: the public key that lets everybody in.
    """

    name: str
    address: str
    disk: str
    names: dict[str, str]
    software: tuple[str, ...]
    shared: tuple[tuple[str, str], ...]
    users: tuple[tuple[str, int], ...]
    authorized: str

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def _bind(source: Path, target: Path, *, writable: bool) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--bind", source, target)
    if not writable:
        _mount("-o", "remount,bind,ro", target)


def _furnish(build: Build, disk: Path) -> None:
    """The files of a new host's disk."""
    for name, mode in OWN.items():
        if name != "etc":
            (disk / name).mkdir()
            (disk / name).chmod(mode)
    for name, mode in _OF_VAR.items():
        (disk / "var" / name).mkdir()
        (disk / "var" / name).chmod(mode)
    (disk / "var/run").symlink_to("/run")
    (disk / "var/lock").symlink_to("/run/lock")
    etc = disk / "etc"
    shutil.copytree("/etc", etc, symlinks=True)
    (etc / "hostname").write_text(f"{build.name}\n")
    _people(build, etc, disk)
    key = etc / "ssh/ssh_host_ed25519_key"
    for old in etc.glob("ssh/ssh_host_*"):
        old.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    lines = (
        f"HostKey /{key.relative_to(disk)}",
        "UsePAM no",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "Subsystem sftp internal-sftp",
    )
    (etc / "ssh/sshd_config").write_text("\n".join(lines) + "\n")


def _people(build: Build, etc: Path, disk: Path) -> None:
    for name, number in build.users:
        for file, line in (
            ("passwd", f"{name}:x:{number}:{number}::/home/{name}:/bin/bash"),
            ("group", f"{name}:x:{number}:"),
            ("shadow", f"{name}:*:19000:0:99999:7:::"),
        ):
            with (etc / file).open("a") as content:
                content.write(f"{line}\n")
    homes = [(disk / "root", 0), *((disk / "home" / name, number) for name, number in build.users)]
    for home, number in homes:
        ssh = home / ".ssh"
        ssh.mkdir(mode=0o700, parents=True)
        keys = ssh / "authorized_keys"
        keys.write_text(f"{build.authorized}\n")
        for path in (home, ssh, keys):
            os.chown(path, number, number)


def _assemble(build: Build, root: Path) -> None:
    """Mount all that the host sees below `root`."""
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root)
    for name in SYSTEM:
        place = Path("/", name)
        if place.is_symlink():
            (root / name).symlink_to(os.readlink(place))
        elif place.is_dir():
            _bind(place, root / name, writable=False)
    disk = Path(build.disk)
    if not (disk / "etc").exists():
        _furnish(build, disk)
    names = "".join(f"{address} {name}\n" for name, address in build.names.items())
    # As installers of Debian write it: a host's name means loopback to itself.
    (disk / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {build.name}\n{names}")
    # Nobody is there to ask for names, and the host's own kernel says so at once. Another machine's would do
    # so only now and then, and who is not answered waits for seconds.
    (disk / "etc/resolv.conf").unlink(missing_ok=True)
    (disk / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
    for name in OWN:
        _bind(disk / name, root / name, writable=True)
    for name in ("dev", "sys"):
        (root / name).mkdir()
        _mount("--rbind", f"/{name}", root / name)
    (root / "proc").mkdir()
    _mount("-t", "proc", "proc", root / "proc")
    (root / "run").mkdir()
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "run")
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / "dev/shm")
    _mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620", "devpts", root / "dev/pts")
    (root / "run/lock").mkdir()
    (root / "run/sshd").mkdir(mode=0o755)
    for installed in build.software:
        _bind(Path(installed), root / installed.lstrip("/"), writable=False)
    for target, source in build.shared:
        _bind(Path(source), root / target.lstrip("/"), writable=True)


def _enter(root: Path) -> None:
    (root / "old").mkdir()
    subprocess.run(["pivot_root", root, root / "old"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/old"], check=True)
    os.rmdir("/old")


def _end_with_whoever_boots() -> None:
    """End when the other end of standard input does, however that ends; all that runs here ends with it."""
    sys.stdin.buffer.read()
    os._exit(0)


def _reap() -> None:
    """Wait for every process whose parent has ended, as the first process of a machine has to."""
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass
        signal.sigwait({signal.SIGCHLD})


def main(arguments: Sequence[str]) -> None:
    build = Build(**json.loads(Path(arguments[0]).read_text()))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    root = Path(arguments[1])
    _assemble(build, root)
    socket.sethostname(build.name)
    _enter(root)
    subprocess.run(["/usr/sbin/sshd"], check=True)
    threading.Thread(target=_end_with_whoever_boots, daemon=True).start()
    print(READY, flush=True)
    _reap()


if __name__ == "__main__":
    main(sys.argv[1:])
