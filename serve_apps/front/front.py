"""The front as an actor on the head: HAProxy goes by the gateways that there are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import as_here, start_on_head
from cluster.actors.named_actor import NamedActor
from cluster.errors import ShoalError
from serve_apps.front.haproxy import FINISH_S, Haproxy
from serve_apps.front.haproxy_config import MOST_CONNECTIONS, FrontSettings, haproxy_config
from serve_apps.front.secret import front_secret
from serve_apps.front.slots import Slots, slots_for
from serve_apps.spec import CONTROLLER, FRONT

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
RETRY_S = 2.0
"""Between two tries after one that has failed."""
ANSWER_TIMEOUT_S = 5.0
FIRST_GATEWAYS_S = 10.0
"""How long a front that starts waits for gateways before it listens: until then connections are refused,
which clients try again."""
OTHER_FILES = 200
"""Files that HAProxy needs beside two for each connection, and one for each server that it looks after."""


class Front:
    """The actor.

    Args:
        info: the broker's facts about the cluster.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = as_here(info)
        self._controller = NamedActor(CONTROLLER, NAMESPACE)
        self._haproxy = Haproxy()
        self._gateways: tuple[str, ...] = ()
        self._slots = Slots(slots_for(info["gateway_count"]))
        self._settings: FrontSettings | None = None
        self._goes_by: str | None = None
        """When the certificate changed that HAProxy has; None: it is to have the whole configuration anew."""
        self._failure: str | None = None
        self._following: asyncio.Task[None] | None = None

    async def state(self) -> dict[str, Any]:
        """How it is: `runs`, `pid` (of HAProxy's master), `gateways` (their URLs), `failure`."""
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        return {
            "runs": self._haproxy.runs(),
            "pid": self._haproxy.pid,
            "gateways": list(self._gateways),
            "failure": self._failure,
        }

    async def end(self) -> None:
        """End HAProxy."""
        if self._following is not None:
            self._following.cancel()
        await asyncio.to_thread(self._haproxy.end)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await self._look()
            if self._gateways or loop.time() - began > FIRST_GATEWAYS_S:
                await asyncio.to_thread(self._go_on)
            # What cannot be started costs a few processes each time.
            await asyncio.sleep(LOOK_EVERY_S if self._failure is None else RETRY_S)

    async def _look(self) -> None:
        try:
            urls: Sequence[str] = await self._controller.ask(
                "desk", "urls", (), {}, timeout_s=ANSWER_TIMEOUT_S
            )
        except (ShoalError, ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("keeping the gateways as they were: %s", error)
            return
        if urls:  # a controller that comes back has not heard of them yet; dead ones get no requests
            self._gateways = tuple(urls)

    def _go_on(self) -> None:
        """Have HAProxy run by what is known now."""
        self._haproxy.trim_log()
        try:
            if self._settings is None:
                self._settings = self._find_settings()
            wanted = _changed_at(self._info["gateway_front"]["certificate"])
            # Nothing may fail between this and what HAProxy is told: it is said once.
            commands = self._slots.change(self._gateways)
            if commands:
                logger.warning("in front of %s", ", ".join(self._gateways))
            if wanted != self._goes_by or not self._haproxy.runs():
                self._goes_by = None
                self._haproxy.go_by(
                    haproxy_config(self._settings, self._slots.servers(), str(self._haproxy.directory))
                )
                self._goes_by = wanted
            elif commands:
                self._goes_by = None  # what is told by halves is told anew
                self._haproxy.tell(commands)
                self._goes_by = wanted
            self._failure = None
        except (ShoalError, OSError) as error:
            if str(error) != self._failure:
                logger.error("the front could not be started: %s", error)
            self._failure = str(error)

    def _find_settings(self) -> FrontSettings:
        """Those that hold for as long as this process does.

        Raises:
            ShoalError: the certificate or its key is not there.
        """
        given = self._info["gateway_front"]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        connections = MOST_CONNECTIONS
        if hard != resource.RLIM_INFINITY:
            free = hard - OTHER_FILES - slots_for(self._info["gateway_count"])
            connections = max(1, min(connections, free // 2))
        settings = FrontSettings(
            host=self._info["gateway_host"],
            port=self._info["gateway_port"],
            secret=front_secret(self._info),
            connections=connections,
            address_connections=given["address_connections"],
            address_requests=given["address_requests"],
            metrics_from=None
            if self._info["gateway_keys"] is None
            else tuple(map(str, self._info["gateway_options"]["metrics_from"])),
        )
        if given["certificate"] is None:
            return settings
        # HAProxy looks for the key beside the certificate; neither is copied.
        linked = self._haproxy.directory / "certificate.pem"
        for link, file in ((linked, given["certificate"]), (Path(f"{linked}.key"), given["private_key"])):
            if not Path(file).is_file():
                raise ShoalError(f"{file} is not there (cluster.gateway.certificate, private_key)")
            link.unlink(missing_ok=True)
            link.symlink_to(file)
        return replace(settings, certificate=str(linked))


def _changed_at(certificate: str | None) -> str:
    if certificate is None:
        return ""
    with contextlib.suppress(OSError):
        return str(os.stat(certificate).st_mtime_ns)
    return ""


def start_front(info: Mapping[str, Any]) -> dict[str, Any]:
    """Have the front run on the head; one that runs is left as it is. Its state, see `Front.state`.

    Raises:
        ShoalError: it did not start in time.
    """
    state: dict[str, Any] = start_on_head(
        Front, FRONT, NAMESPACE, dict(info), what="the front of the gateways", first_call="state"
    )
    return state


def end_front() -> None:
    """End the front, if there is one, once the requests that it has are answered."""
    front = NamedActor(FRONT, NAMESPACE)
    with contextlib.suppress(ShoalError):
        front.call("end", timeout_s=ANSWER_TIMEOUT_S + FINISH_S)
        front.end()
