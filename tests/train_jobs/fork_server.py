"""A fork server that ranks are forked from, without a cluster."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from train_jobs.rank.link import LinkAddress

RANK = "train_jobs.rank.process:run_rank_process"


class Server:
    """A fork server, as an actor of a node starts it."""

    def __init__(self, *preloaded: str) -> None:
        self._socket, theirs = socket.socketpair()
        program = [sys.executable, "-m", "cluster.node.fork_server", str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*program, json.dumps(sys.path), *preloaded], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._lines = self._socket.makefile("rw")
        assert self.answer() == {}

    def fork(self, number: int, at: LinkAddress) -> int:
        """The pid of a rank's process."""
        arguments = {"address": at.address, "authkey": at.authkey.hex()}
        request = {"id": number, "function": RANK, "arguments": arguments}
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        answer = self.answer()
        assert answer["id"] == number
        return answer["pid"]

    def answer(self) -> dict[str, int]:
        return json.loads(self._lines.readline())

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        self.process.wait(10)
