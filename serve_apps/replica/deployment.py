"""One replica of an app, as Serve has it: it takes requests, and has an engine in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cluster.errors import ShoalError
from cluster.node.node_agent import address_on_node, node_is_kept
from serve_apps.engine.protocol import EngineError, WeightsError
from serve_apps.http.log import log_as_json
from serve_apps.openai.errors import replica_lost
from serve_apps.replica.controller_link import ControllerLink
from serve_apps.replica.engine_line import LineLostError
from serve_apps.replica.engine_processes import EngineProcesses
from serve_apps.replica.watchdog import Watchdog
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 15.0
"""A replica whose event loop, or whose engine's, stands still for so long is ended."""
WATCH_EVERY_S = 0.5
"""How often a replica looks whether its engine lives, and shows that it lives itself."""


class Replica:
    """The Serve deployment's class. It imports no torch: the engine's ranks are forks on its node.

    Args:
        spec: an `AppSpec` as JSON.
        application: the Serve application's name, APP:REVISION; None keeps apart from the controller.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, spec: Mapping[str, Any], application: str | None = None
    ) -> None:
        import ray
        from ray import serve

        log_as_json()
        self._started_at, self._ready_at = _now(), ""
        self.spec = AppSpec.from_json(spec)
        self.id = serve.get_replica_context().replica_tag
        self.revision = 0
        """The number of the revision whose weights it has."""
        self._prepared: int | None = None
        self._refused: int | None = None
        self._refusal: str | None = None
        self._link: ControllerLink | None = None
        if application is not None:
            self.revision = int(application.rpartition(":")[2])
            self._link = ControllerLink(application, self.id, self._facts, self._obey)
            now = await self._link.spec()
            if now is not None:
                self.revision, self.spec = now["revision"], AppSpec.from_json(now["spec"])
        self._node = ray.util.get_node_ip_address()
        self._engine = EngineProcesses(
            self.id, address_on_node(), node_is_kept, on_lost=self._lost, on_orphans=self._tell_orphans
        )
        await self._start_in_time()
        self._ready_at, self._ready = _now(), time.monotonic()
        self._watching = asyncio.create_task(self._watch())
        self._linked = asyncio.create_task(self._link.run()) if self._link is not None else None

    async def _start_in_time(self) -> None:
        """End a replica that hangs while it starts, so that another comes: Serve would wait for ever."""
        seconds = self.spec.config.update.ready_timeout_s
        try:
            async with asyncio.timeout(seconds) as limit:
                self._context_length = await self._engine.start(self.spec, self.revision, self._node)
        except TimeoutError:
            if limit.expired():
                self._lost(f"it was not ready within {seconds:g} s")
            raise

    def _lost(self, why: str) -> None:
        # Half an engine answers nothing. This process ends at once, so that the router drops it now and the
        # gateway sends its requests elsewhere; its devices are free, and a whole new replica comes.
        logger.error("replica %s ends: %s", self.id, why)
        self._engine.kill()
        logging.shutdown()
        os._exit(1)

    async def _watch(self) -> None:
        watchdog = Watchdog(HANG_TIMEOUT_S)
        try:
            while True:
                watchdog.beat()
                # Counted in this loop's own steps: a machine that stood still as a whole is no reason.
                if self._engine.silent_looks() * WATCH_EVERY_S >= HANG_TIMEOUT_S:
                    self._lost(f"its engine was silent for {HANG_TIMEOUT_S:g} s")
                await asyncio.sleep(WATCH_EVERY_S)
        finally:
            watchdog.stop()

    def _facts(self) -> dict[str, Any]:
        """What the controller is told."""
        return {
            "revision": self.revision,
            "context_length": self._context_length,
            "prepared": self._prepared,
            "refused": self._refused,
            "refusal": self._refusal,
            "engine": self._engine.statistics,
            "started_at": self._started_at,
            "ready_at": self._ready_at,
            "ready_s": time.monotonic() - self._ready,
        }

    async def _obey(self, order: Mapping[str, Any]) -> None:
        """Get ready for another version of the model, or go on with it; both leave what runs as it is when
        they cannot."""
        spec, number = order["spec"], order["revision"]
        try:
            if order["action"] == "prepare":
                await self._engine.call("prepare", spec)
                self._prepared = number
                return
            await self._engine.call("load", spec, number)
        except (WeightsError, EngineError, ShoalError, OSError) as error:
            self._refused, self._refusal = number, str(error)
            logger.error("replica %s cannot load revision %d: %s", self.id, number, error)
            if order.get("or_end"):
                self._lost("it cannot go back to the weights that it is to have")
            return
        self.spec, self.revision = AppSpec.from_json(spec), number
        self._refused = self._refusal = None

    def _tell_orphans(self, keys: Sequence[str]) -> None:
        if self._link is not None:
            self._link.tell_orphans(keys)

    async def statistics(self) -> dict[str, Any]:
        """The engine's statistics, the replica's id, its process (`pid`) and those of its ranks (`ranks`)."""
        own = {"replica": self.id, "pid": os.getpid(), "ranks": self._engine.pids()}
        return {**own, **await self._engine.call("statistics")}

    async def check_health(self) -> None:
        """Raise when the replica cannot go on; Serve then replaces it."""
        if self._watching.done():
            self._watching.result()

    async def generate(
        self, request: Mapping[str, Any], address: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run one request of a gateway, see `EngineHost.generate`."""
        return await self._ask("generate", request, address)

    async def embed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `EngineHost.embed`."""
        return await self._ask("embed", request)

    async def tokenize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `EngineHost.tokenize`."""
        return await self._ask("tokenize", request)

    async def tokenizer_info(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `EngineHost.tokenizer_info`."""
        return await self._ask("tokenizer_info", request)

    async def detokenize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `EngineHost.detokenize`."""
        return await self._ask("detokenize", request)

    async def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await self._engine.call(method, *arguments)
        except LineLostError:
            start = {"replica": self.id, "model_version": self.spec.model_version}
            return {"start": start, **replica_lost().as_item(), "engine_broke": True}
        return answer

    async def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            for task in (getattr(self, "_watching", None), getattr(self, "_linked", None)):
                if task is not None:
                    task.cancel()
            with contextlib.suppress(EngineError, LineLostError):
                await engine.stop()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
