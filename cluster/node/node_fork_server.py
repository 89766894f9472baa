"""The fork server of a node: every owner of processes gets one of its own, as a fork of it.

Its arguments are LISTENER KEEPER PATH MODULES…. Whoever connects is a new owner; the fork that answers it
has everything imported, serves it until it is gone (cluster.node.fork_server), and does not need this process
any more: one that dies takes nobody with it.

No Ray in here, and no thread before a fork: neither would survive it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

from cluster.node.dial import DialAddress, dial, receive
from cluster.node.fork_server import ForkServer, settle
from cluster.node.output import send_output
from cluster.node.shared_imports import SharedImports
from cluster.node.surroundings import (
    Surroundings,
    imported_packages,
    is_own,
    show_environment,
    show_title,
)

LENGTH = struct.Struct("!I")
"""Before the surroundings of an owner, its bytes; with them come the descriptors of its output and errors."""
FORKS = "forks"
"""What a fork server calls for that is to be another node's process's."""
TITLE = "shoal::ForkServer:"
"""How the command line of an owner's fork server begins."""
MOST_BYTES = 16 * 2**20
HELLO_S = 10.0
"""How long an owner may take to say what it is."""


def serve(listener: socket.socket, keeper: socket.socket, modules: Iterable[str]) -> None:
    """Answer owners until the keeper is gone.

    Args:
        listener: where owners connect.
        keeper: of whoever keeps this process: every byte from there is answered by one, as a sign of life.
    """
    own = Surroundings.here()
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001  (whoever needs it fails, and says so; the others do not)
            traceback.print_exc()
    shared = SharedImports()
    imported = Imported()
    settle()
    # Owners' servers are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    keeper.sendall(b".")
    heard: list[Any] = [listener, keeper, shared.heard]
    while True:
        ready, _, _ = select.select(heard, [], [])
        if keeper in ready:
            if not keeper.recv(64):
                return
            keeper.sendall(b".")
        if listener in ready:
            if imported.has_changed():
                _begin_anew(listener, keeper)  # who waits there is answered by that one
            _answer(listener, keeper, own)
        elif shared.heard in ready and shared.take():
            imported = Imported()
            settle()


def _answer(listener: socket.socket, keeper: socket.socket, own: Surroundings) -> None:
    owner, _ = listener.accept()
    if os.fork():
        owner.close()
        return
    code = 1
    try:
        listener.close()
        keeper.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # what is sent to the group of the node's server is not for this one
        if is_own(owner) and (requests := _become(owner, own)) is not None:
            ForkServer(requests).serve()
        code = 0
    except BaseException:  # noqa: BLE001  (nothing may run on into the loop above)
        traceback.print_exc()
    finally:
        os._exit(code)


def _become(owner: socket.socket, own: Surroundings) -> socket.socket | None:
    """Take on what an owner has around it; where its requests come, or None: that cannot be, and it has been
    told why."""
    owner.settimeout(HELLO_S)
    wanted, descriptors, call = receive_hello(owner)
    owner.settimeout(None)
    for place, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    why_not = wanted.misfit(own, imported_packages())
    if why_not is None:
        try:
            os.chdir(wanted.directory)
        except OSError as error:
            why_not = f"it cannot be where it is: {error}"
    requests = owner
    if why_not is None and call is not None:
        try:
            requests = dial(call, FORKS)
            send_output(call)
        except OSError as error:
            why_not = f"{call.host}:{call.port} cannot be called: {error}"
    if why_not is not None:
        owner.sendall(json.dumps({"refused": why_not}).encode() + b"\n")
        return None
    os.environ.clear()
    os.environ.update(wanted.environment)
    show_environment(wanted.environment)
    show_title(f"{TITLE}{wanted.title}")
    sys.path[:] = wanted.path
    take_threads()
    _print_at_once()
    if requests is not owner:
        owner.sendall(b"{}\n")
        owner.close()
    return requests


def take_threads() -> None:
    """OpenMP has read how many threads it may have when it was loaded; what torch sets, it takes."""
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdecimal():
        torch.set_num_threads(max(1, int(threads)))


def _print_at_once() -> None:
    """Python has read when it started whether lines are to be written as they come."""
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # both are files here


def send_hello(
    connection: socket.socket,
    surroundings: Surroundings,
    output: int,
    errors: int,
    call: DialAddress | None = None,
) -> None:
    """Say what an owner has around it; its forks write to these two descriptors.

    Args:
        call: whom the fork server is to call, for FORKS, whose it is then, and where its output goes; None:
            it is the caller's.
    """
    document = {**surroundings.as_json(), "call": None if call is None else call.as_json()}
    said = json.dumps(document).encode()
    socket.send_fds(connection, [LENGTH.pack(len(said))], [output, errors])
    connection.sendall(said)


def receive_hello(owner: socket.socket) -> tuple[Surroundings, list[int], DialAddress | None]:
    """See `send_hello`.

    Raises:
        ConnectionError: the owner has gone, or says something else.
    """
    head, descriptors, _, _ = socket.recv_fds(owner, LENGTH.size, 2)
    length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else MOST_BYTES + 1
    if length > MOST_BYTES or len(descriptors) != 2:
        raise ConnectionError("an owner of processes said something that is not understood")
    document = json.loads(receive(owner, length))
    call = document.pop("call")
    whom = None if call is None else DialAddress.from_json(call)
    return Surroundings.from_json(document), descriptors, whom


class Imported:
    """The files of what this process has imported."""

    def __init__(self) -> None:
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._files = {file: _stamp(file) for file in files if file}

    def has_changed(self) -> bool:
        """Whether one of them is another by now: a package was installed, say."""
        return any(_stamp(file) != stamp for file, stamp in self._files.items())


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _begin_anew(listener: socket.socket, keeper: socket.socket) -> NoReturn:
    """Import everything again, as the same process."""
    for each in (listener, keeper):
        each.set_inheritable(True)
    os.execv(sys.executable, [*sys.orig_argv])


def main() -> None:
    listener, keeper = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for each in (listener, keeper):
        each.set_inheritable(False)
    sys.path[:] = json.loads(sys.argv[3])  # that of whoever started it: packages may lie anywhere
    serve(listener, keeper, sys.argv[4:])
