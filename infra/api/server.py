"""The control API where it runs: an actor on the head that is there for as long as the cluster is up."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import as_here, begin_on_head
from cluster.actors.named_actor import NamedActor
from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from cluster.sharing.client import BrokerClient
from cluster.state.record import ClusterRecord, NodeRecord
from infra.api.access import digest_of, own_token

if TYPE_CHECKING:
    from infra.api.control import Control

NAME = "shoal-api"
START_S = 30.0
"""Longest until it listens; so long, too, the process before it may take to let go of its port."""
BIND_EVERY_S = 0.2
CALL_S = 10.0
KEEP_EVERY_S = 2.0

logger = logging.getLogger(__name__)


class ApiServer:
    """The actor.

    Args:
        record: the cluster's, as plain data.
        cluster: its section of the config, as plain data.
        sha256: the digest of the token that opens everything.
        serves: whether the config has apps: Serve, their controller and the gateway are started then, so that
            who serves the first one need not wait for that.
    """

    def __init__(self, record: dict[str, Any], cluster: dict[str, Any], sha256: str, serves: bool) -> None:
        nodes = tuple(NodeRecord(**node) for node in record["nodes"])
        # What the caller's machine has is not this one's.
        self._record = replace(
            ClusterRecord(**{**as_here(record), "nodes": nodes}), token_path=None, python=sys.executable
        )
        self._cluster = ClusterConfig.model_validate(cluster)
        self._sha256 = sha256
        self._serves = serves
        self._failure: str | None = None
        self._settled = threading.Event()
        threading.Thread(target=self._run, name="control-api", daemon=True).start()

    def failure(self) -> str | None:
        """Why it does not listen; None when it does."""
        if not self._settled.wait(START_S + CALL_S):
            return "it takes too long"
        return self._failure

    def _run(self) -> None:
        try:
            self._serve()
        except (ShoalError, OSError, ValueError) as error:
            logger.error("the control API could not be started: %s", error)
            self._failure = str(error)
        finally:
            self._settled.set()

    def _serve(self) -> None:
        import uvicorn

        from infra.api.app import build_api
        from infra.api.control import control_of

        control = control_of(self._record, self._cluster)
        control.tokens.trust(self._sha256)
        api = self._cluster.api
        config = uvicorn.Config(
            build_api(control),
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            server_header=False,
            lifespan="off",
            ssl_certfile=api.certificate,
            ssl_keyfile=api.private_key,
        )
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            raise ShoalError(
                f"cluster.api: the certificate {api.certificate}, or its key {api.private_key}, cannot be"
                f" used: {error}"
            ) from error
        listener = bind(self._record.api_host, self._record.api_port)
        server = uvicorn.Server(config)
        threading.Thread(target=self._watch, args=(server, control), daemon=True).start()
        server.run(sockets=[listener])

    def _watch(self, server: Any, control: Control) -> None:
        """See it come up; then load what the first request would wait for."""
        while not server.started and not self._settled.is_set():
            time.sleep(0.02)
        self._settled.set()
        import serve_apps.commands
        import serve_apps.models
        import serve_apps.status
        from infra.tenant_book import TenantBook

        with suppress(ShoalError):  # whoever asks is told so
            control.jobs.table.rows()
        book = TenantBook.of_this_cluster()
        if self._serves and book is None:  # else those are served again that were before
            with suppress(ShoalError):
                serve_apps.commands.begin_to_serve(BrokerClient().info())
        while book is not None:
            with suppress(ShoalError, OSError):  # at the next look
                specs = serve_apps.commands.served_specs()
                if specs is not None:  # a cluster that has just come back says nothing of those before
                    book.keep_apps(specs)
            time.sleep(KEEP_EVERY_S)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; a port that is taken may be that of the process before, which is ending.

    Raises:
        ShoalError: it is taken for too long, or the address is not this machine's.
    """
    deadline = time.monotonic() + START_S
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    while True:
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ShoalError(f"nothing can listen on port {port} of {host}: {error.strerror}") from error
        time.sleep(BIND_EVERY_S)


def begin_api(record: ClusterRecord, cluster: ClusterConfig, serves: bool) -> Callable[[], None]:
    """Have it started on the head, while one waits for others; one that runs is left alone.

    Needs a connection to the cluster (`ray.init`).

    Args:
        serves: see `ApiServer`.

    Returns:
        what waits until it listens, and raises ShoalError where it does not.
    """
    section = cluster.model_dump(mode="json", by_alias=True)
    facts = (asdict(record), section, digest_of(own_token(record)), serves)
    answer = begin_on_head(ApiServer, NAME, NAMESPACE, *facts, what="the control API", first_call="failure")

    def wait() -> None:
        failure = answer()
        if failure is not None:
            end_api()
            raise ShoalError(f"the control API could not be started: {failure}")

    return wait


def end_api() -> None:
    """End it, where it is there."""
    NamedActor(NAME, NAMESPACE).end()
