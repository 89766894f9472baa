"""The processes of an engine's ranks, from their first line to their last: forks, without Ray.

Rank 0 has the engine itself, and all that makes answers of what it generates (`EngineHost`).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import uvloop

from cluster.node.dial import DialAddress, dial
from serve_apps.engine.config import engine_config
from serve_apps.engine.devices import hide_what_is_not_leased
from serve_apps.engine.engine_table import find_engine
from serve_apps.http.log import log_as_json
from serve_apps.http.request_record import shown
from serve_apps.models import model_directory
from serve_apps.replica.engine_host import EngineHost
from serve_apps.replica.engine_line import EngineLine
from serve_apps.replica.engine_processes import LINE
from serve_apps.spec import AppSpec

REPLICA = "SHOAL_REPLICA"
"""In the environment of an engine's processes: the id of their replica."""


def run_engine(address: Mapping[str, Any], replica: str) -> None:
    """Be the engine of a replica, which is called at this address, until that is gone."""
    os.environ[REPLICA] = replica
    log_as_json()
    uvloop.run(_serve(dial(DialAddress.from_json(address), LINE), replica))
    # What libraries have started besides must not hold up the end, nor what they do at exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(connection: socket.socket, replica: str) -> None:
    host = EngineHost(replica, connection.getsockname()[0])
    reader, writer = await asyncio.open_connection(sock=connection)
    line = EngineLine(reader, writer, host)
    host.line = line
    await line.run()


def run_rank(
    spec: Mapping[str, Any], replica: str, rank: int, host: str, port: int, visible: Mapping[str, str]
) -> None:
    """Be rank `rank` (1 or more) of a replica's engine until rank 0 says stop.

    Args:
        spec: an `AppSpec` as JSON.
        host, port: where the ranks meet.
        visible: the variables that show it the engine's devices.
    """
    os.environ.update({REPLICA: replica, **visible})
    log_as_json(rank=rank)
    sys.stdout = sys.stderr = _LinesOfRank(rank)
    app = AppSpec.from_json(spec)
    config = engine_config(app, model_directory(app))
    hide_what_is_not_leased(config)
    find_engine(app.engine).load_follow()(config, rank, host, port)


class _LinesOfRank:
    """Writes what a rank prints where its replica writes, as lines that say whose they are."""

    encoding = "utf-8"

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._unended = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._unended = (self._unended + text).split("\n")
            for line in lines:
                said = {"time": shown(datetime.now(UTC)), "rank": self._rank, "message": line}
                os.write(2, json.dumps(said).encode() + b"\n")
        return len(text)

    def flush(self) -> None:
        """Whole lines are written at once."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 2
