"""Has Serve and the gateways run, whoever ends them: Ctrl-C of `serve run` does, and `serve shutdown`."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import ray

from cluster.errors import ShoalError
from cluster.state.record import http_url
from serve_apps.controller.calls import Calls
from serve_apps.controller.serve_state import ServeSeen
from serve_apps.controller.threads import Threads
from serve_apps.front.front import start_front
from serve_apps.replica.serve_private import ServeInstance, find_serve
from serve_apps.spec import GATEWAY, gateway_of

logger = logging.getLogger(__name__)

SERVE = "serve"
RETRY_S = 5.0
"""Between two tries to start what could not be started."""
LEAVE_S = 10.0
"""How long who ends the cluster waits for what is being started."""
LOOK_AT_FRONT_S = 1.0
"""Between two looks whether the front is there."""

Notice = tuple[str, dict[str, Any]]
StartGateway = Callable[[Mapping[str, Any], str | None], None]
"""Gives Serve the gateway of a node, from the broker's facts and the node's id (None: the head); returns
before it is ready."""
StartFront = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Has the front of the gateways run, from the broker's facts; its state, see `Front.state`."""
EndGateway = Callable[[str], None]
"""Has Serve end the gateway of this Serve application, once its requests are finished."""


def start_serve(info: Mapping[str, Any]) -> None:
    """Start Serve, with its own proxy on the head alone; one that runs is left as it is."""
    from ray import serve

    try:
        serve.start(
            # Shoal's apps do not need it; one on each node would cost each of them its memory.
            proxy_location="HeadOnly",
            # Without a host of its own it listens where Ray has it.
            http_options={
                key: info[f"serve_{key}"] for key in ("host", "port") if info[f"serve_{key}"] is not None
            },
            logging_config={"enable_access_log": False},
        )
    except (ray.exceptions.RayTaskError, TimeoutError) as error:
        if find_serve() is None:
            raise
        # Another program may have its port. Shoal's apps are served all the same.
        logger.warning("Serve's own proxy does not listen: %s", error)


def end_gateway(application: str) -> None:
    """See EndGateway."""
    from serve_apps.controller.serve_application import delete

    delete(application)


class ServeKeeper:
    """Sees to it that Serve and the gateways are there, and knows why they are not.

    Args:
        info: the broker's facts about the cluster.
        start_serve, start_gateway, end_gateway, start_front: carry it out, in threads of their own; those of
            a test.
    """

    def __init__(
        self,
        info: Mapping[str, Any],
        calls: Calls,
        threads: Threads,
        start_gateway: StartGateway,
        start_serve: Callable[[Mapping[str, Any]], None] = start_serve,
        end_gateway: EndGateway = end_gateway,
        start_front: StartFront = start_front,
    ) -> None:
        self._info = info
        self._calls = calls
        self._threads = threads
        self._start_serve = start_serve
        self._start_gateway = start_gateway
        self._end_gateway = end_gateway
        self._start_front = start_front
        self._front: dict[str, Any] | None = None
        """The state of the front, as of the last look; None: not known, or there is to be none."""
        self._looking: asyncio.Task[None] | None = None
        self._tried_at: dict[str, float] = {}
        """By what was tried: SERVE, or the Serve application of a gateway."""
        self._left = asyncio.Event()
        """The cluster ends: nothing is to be started."""
        self._serve: ServeInstance | None = None
        self._started = False
        """Whether the Serve that runs, or comes, was started here."""
        self._leaving_since: float | None = None
        self._ended_at: float | None = None
        """When Serve was ended by somebody else, until all is back. Unix time."""
        self.failure = ""
        """Why the head's gateway, or Serve, could not be started the last time."""
        self._failures: dict[str, str] = {}
        """The same of the other gateways, by Serve application."""

    @property
    def id(self) -> str:
        """That of the Serve that runs; empty where none does."""
        return "" if self._serve is None else self._serve.id

    @property
    def takes(self) -> bool:
        """Whether Serve can be given an application."""
        return self._serve is not None and self._leaving_since is None

    @property
    def note(self) -> str:
        """Why Serve is away, for people; empty where it is not."""
        if self._leaving_since is not None:
            return (
                f"Serve is being shut down by somebody else since {_clock(self._leaving_since)};"
                " it is brought back when that is over"
            )
        if self._ended_at is not None:
            return (
                f"Serve was shut down by somebody else at {_clock(self._ended_at)} (Ctrl-C of `serve run` and"
                " `serve shutdown` do that); it is being brought back"
            )
        return ""

    def words(self, silence: str) -> str:
        """The note, or that Serve does not answer."""
        return self.note or (f"Serve does not answer ({silence})" if silence else "")

    def try_again(self) -> None:
        """Somebody asks for it now: what could not be started is tried at once."""
        self._left.clear()
        self.failure = ""
        self._failures.clear()
        self._tried_at.clear()

    async def leave(self) -> None:
        """Start nothing until somebody asks for it again; what is being started is there when this returns,
        for others to end."""
        self._left.set()
        await self._calls.until_ended("start", LEAVE_S)
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=LEAVE_S)

    def keep(
        self, seen: ServeSeen, ours: Mapping[str, bool], now: float, others: Collection[str] = ()
    ) -> list[Notice]:
        """Start what is not there; what has happened, for the apps' events.

        Args:
            ours: whether each Serve application that is to be there answers; no application that Shoal itself
                takes away is among them.
            now: Unix time.
            others: ids of the nodes that are to have a gateway beside the head.
        """
        events = self._notice(seen, ours, now)
        looking = self._looking is not None and not self._looking.done()
        if self._info.get("gateway_front") and not looking and not self._left.is_set():
            self._looking = asyncio.create_task(self._keep_front())
        if seen.instance is None:
            self._begin(SERVE, lambda: self._start_serve(self._info))
        elif self.takes:
            self._keep_gateway(GATEWAY, None, seen)
            for node in others:
                self._keep_gateway(gateway_of(node), node, seen)
            for application in seen.gateways.keys() - {GATEWAY, *map(gateway_of, others)}:
                self._failures.pop(application, None)
                if seen.gateways[application].status != "deleting":
                    self._calls.begin("delete", application, self._end(application))
            gateway = seen.gateways.get(GATEWAY)
            if gateway is not None and gateway.status == "running":
                self.failure = ""
                if self._ended_at is not None and all(ours.values()):
                    events.append(("serve_back", {"seconds": round(now - self._ended_at, 3)}))
                    self._ended_at = None
        return events

    async def _keep_front(self) -> None:
        try:
            self._front = await self._threads.call_serve(lambda: self._start_front(self._info))
        except ShoalError as error:
            self._front = {"runs": False, "failure": str(error)}
        with suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), LOOK_AT_FRONT_S)

    def _keep_gateway(self, application: str, node: str | None, seen: ServeSeen) -> None:
        gateway = seen.gateways.get(application)
        failure = None if gateway is None else gateway.failure
        if gateway is not None and failure is None:
            if gateway.status == "running":
                self._failures.pop(application, None)
            return
        if ("delete", application) in self._calls:
            return  # its node was not to have one a moment ago
        began = self._begin(application, lambda: self._start_gateway(self._info, node))
        if failure is not None and not began:
            self._failed(application, failure)

    def _failed(self, what: str, why: str) -> None:
        if what in (SERVE, GATEWAY):
            self.failure = why
        else:
            self._failures[what] = why

    def _notice(self, seen: ServeSeen, ours: Mapping[str, bool], now: float) -> list[Notice]:
        """Take in whether Serve is there, is being shut down, or has been."""
        before, self._serve = self._serve, seen.instance
        there = seen.instance is not None and (before is None or before.id == seen.instance.id)
        if there:
            statuses = [each.status for name, each in seen.applications.items() if name in ours]
            statuses += [seen.gateways[GATEWAY].status] if GATEWAY in seen.gateways else []
            leaves = "deleting" in statuses
            self._leaving_since = (self._leaving_since or now) if leaves else None
            return []
        self._started = self._started and before is None
        # It may also have been away before this controller, which has died itself, could see it.
        if before is None and (self._ended_at is not None or not ours):
            return []
        self._ended_at, self._leaving_since = self._leaving_since or now, None
        self._tried_at.clear()
        return [("serve_ended", {"reason": self.note})]

    def _begin(self, what: str, start: Callable[[], None]) -> bool:
        """Whether it is being started now: what has failed a moment ago is not."""
        if ("start", what) in self._calls:
            return True
        if self._left.is_set() or time.monotonic() - self._tried_at.get(what, -math.inf) < RETRY_S:
            return False
        self._tried_at[what] = time.monotonic()
        self._calls.begin("start", what, self._carry_out(what, start))
        return True

    async def _carry_out(self, what: str, start: Callable[[], None]) -> None:
        from serve_apps.controller.serve_application import SERVE_GONE

        try:
            await self._threads.call_serve(start)
            self._started = self._started or what == SERVE
        except SERVE_GONE as error:
            # Somebody ends Serve at this moment: it is no failure of what is started.
            logger.warning("%s is not started, Serve ends: %s", what, error)
        except Exception as error:
            self._failed(what, f"{what} could not be started: {error}")
            raise

    async def _end(self, application: str) -> None:
        await self._threads.call_serve(lambda: self._end_gateway(application))

    def describe(self, seen: ServeSeen, silence: str) -> dict[str, Any]:
        """How Serve is: `status` (running, starting, ending), `url` of its proxy where it has one, `proxies`
        (how each is), `note`, `gateway` (the status of the head's), `failure`, `gateway_failures` (of the
        others, by Serve application), `front` (its state, see `Front.state`; None: there is to be none),
        `started` (whether Shoal has started it)."""
        instance = seen.instance
        url = None
        if instance is not None and instance.host is not None and seen.proxies:
            url = http_url(instance.host, instance.port, self._info["head_ip"])
        status = "ending" if self._leaving_since is not None else "running" if instance else "starting"
        return {
            "status": "silent" if silence else status,
            "url": url,
            "proxies": list(seen.proxies),
            "note": self.words(silence) or None,
            "gateway": seen.gateways[GATEWAY].status if GATEWAY in seen.gateways else None,
            "failure": self.failure or None,
            "gateway_failures": dict(self._failures),
            "front": self._described_front(),
            "started": self._started,
        }

    def _described_front(self) -> dict[str, Any] | None:
        if not self._info.get("gateway_front"):
            return None
        return self._front or {"runs": False, "failure": None}


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
