"""The gateway's line to the apps' controller: it says what requests there are, and hears of versions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor, NoActorError
from cluster.config.reading.api_keys import KeyRing
from serve_apps.gateway.app_table import AppTable
from serve_apps.gateway.replica_backend import ReplicaBackend
from serve_apps.gateway.service import GatewayService
from serve_apps.openai.errors import ApiError, unavailable
from serve_apps.quotas.shared_limits import BankSilentError, SharedLimits
from serve_apps.routing.active import tell_active, tell_gateways
from serve_apps.spec import CONTROLLER

logger = logging.getLogger(__name__)

WATCH_S = 5.0
"""The longest that the controller holds back its answer while the table stays as it is."""
POLL_S = 0.5
"""How often the gateway asks for the apps where the controller does not answer."""
LOOK_AT_MOST_EVERY_S = 0.05
"""However many requests name a model that is not there."""
ANSWER_TIMEOUT_S = 5.0
FIRST_LOOK_EVERY_S = 0.05
FIRST_TABLE_S = 10.0
"""How long a gateway that starts waits for the apps before it listens: until then connections are refused,
which clients try again; afterwards requests are answered with 503."""


class TableFollower:
    """Keeps a gateway's table of apps, its keys, its shares among the gateways, and its handles to replicas,
    as the controller says.

    Args:
        gateway_id: what the controller knows this gateway by.
        limits: those that are shared with other gateways; None: there are no others.
        facts: what the controller is told of this gateway beside what it does.
    """

    def __init__(
        self,
        gateway_id: str,
        service: GatewayService,
        backend: ReplicaBackend,
        limits: SharedLimits | None,
        facts: Mapping[str, Any],
    ) -> None:
        self._gateway_id = gateway_id
        self._service = service
        self._backend = backend
        self._limits = limits
        self.facts = dict(facts)
        self._keys = ""
        """The digest of those that were told last."""
        self._controller = NamedActor(CONTROLLER, NAMESPACE)
        self._looking = asyncio.Lock()
        self._looked_at = 0.0
        self._pause_s = POLL_S
        self._news = asyncio.Event()
        """Set when there is something to tell or to hear."""
        service.traffic.on_first_wait = self._news.set

    async def look(self) -> AppTable:
        """Tell the controller what there is to do here, and go by what it answers.

        Raises:
            ApiError: it does not answer.
        """
        async with self._looking:
            traffic = self._service.traffic
            if self._service.table is not None and time.monotonic() - self._looked_at < LOOK_AT_MOST_EVERY_S:
                return traffic.table
            self._looked_at = time.monotonic()
            try:
                report = {
                    **traffic.report(),
                    "places": self._service.places.report(),
                    "keys": self._keys,
                    **self.facts,
                }
                answer = await self._controller.ask(
                    "follow", self._gateway_id, report, timeout_s=ANSWER_TIMEOUT_S
                )
            except (NoActorError, ray.exceptions.RayError, TimeoutError) as error:
                # The last table stays right: the controller is the one that changes things.
                self._pause_s = POLL_S
                raise unavailable(f"The list of models cannot be read: {error}") from error
            traffic.told()
            self._pause_s = answer["poll_s"]
            await self._take_shares(answer)
            if "apps" in answer:
                table = AppTable.from_json(answer["number"], answer["apps"])
                await self._backend.connect(table.applications, answer["serve"])
                tell_active(table.active)
                self._service.table = table
            elif self._service.table is not None:
                await self._backend.connect(self._service.table.applications, answer["serve"])
            if "engines" in answer:
                self._service.metrics.engines.take_over(answer["engines"], time.monotonic())
            if self._service.table is None:
                # A controller that comes back has not heard of everybody yet.
                raise unavailable("The list of models is not known yet; try again in a moment.")
            return traffic.table

    async def _take_shares(self, answer: Mapping[str, Any]) -> None:
        """Take over the keys, and what this gateway has of places and limits."""
        places = self._service.places
        places.gateways = answer["gateways"]
        tell_gateways(answer["gateways"])
        places.take_over(answer["shares"])
        self._service.metrics.tells_of_apps = answer["tells_of_apps"]
        if self._limits is not None:
            self._limits.gateways = answer["gateways"]
        if (keys := answer.get("keys")) is not None:
            # To read many takes seconds, in which nothing else of this process would get far.
            self._service.access.keys = await asyncio.to_thread(KeyRing.from_json, keys["entries"])
            self._service.access.waits_for_keys = False
            self._keys = keys["digest"]

    async def run(self) -> None:
        """Look again and again, and at once when there is news, until cancelled."""
        watching = asyncio.create_task(self._watch())
        try:
            await self._look_for_ever()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Hear of another table at once."""
        while True:
            table = self._service.table
            try:
                seen = table.number if table is not None else 0
                news = await self._controller.ask(
                    "table_news", seen, WATCH_S, timeout_s=WATCH_S + ANSWER_TIMEOUT_S, once=True
                )
            except (NoActorError, ray.exceptions.RayError, TimeoutError):
                await asyncio.sleep(POLL_S)
                continue
            if news:
                self._news.set()
                await asyncio.sleep(LOOK_AT_MOST_EVERY_S)

    async def _look_for_ever(self) -> None:
        while True:
            self._news.clear()
            try:
                await self.look()
                if self._limits is not None:
                    await self._limits.tell()
            except BankSilentError as error:
                logger.warning("what tenants took is told later: %s", error)
            except ApiError as error:
                logger.warning("keeping the apps as they were: %s", error.message)
            except Exception:  # whatever it is: a gateway that ends for it breaks what it answers
                logger.exception("keeping the apps as they were")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._news.wait()
                # What is news a moment after a look is looked for when that may be.
                await asyncio.sleep(max(0.0, self._looked_at + LOOK_AT_MOST_EVERY_S - time.monotonic()))

    async def first_table(self) -> None:
        """Wait until the apps and the keys are known, though not for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TABLE_S):
                while self._service.table is None or self._service.access.waits_for_keys:
                    await asyncio.sleep(FIRST_LOOK_EVERY_S)
