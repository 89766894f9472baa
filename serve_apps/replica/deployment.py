"""One replica of an app, as Serve has it: it takes requests, and has an engine in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import ray
from ray import serve

from cluster.errors import ShoalError
from cluster.node.node_agent import fork_on
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.protocol import EngineError, UnsupportedError, WeightsError
from serve_apps.http.log import log_as_json
from serve_apps.openai.errors import replica_lost
from serve_apps.replica.controller_link import ControllerLink
from serve_apps.replica.engine_line import CallEndedError, LineLostError
from serve_apps.replica.engine_processes import EngineProcesses
from serve_apps.replica.given_devices import take_devices
from serve_apps.replica.parked_engine import ParkedEngine
from serve_apps.replica.watchdog import Watchdog
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 15.0
"""A replica whose event loop, or whose engine's, stands still for so long is ended."""
WATCH_EVERY_S = 0.5
"""How often a replica looks whether its engine lives, and shows that it lives itself."""
DRAIN_LOOK_S = 0.05
EARLY_S = 3600.0
"""How long an engine waits for devices that others have to leave first; the controller ends it sooner."""
LEAVE_S = 1.0
"""How long a replica that ends may take for that."""


class Replica:
    """The Serve deployment's class. It imports no torch, and holds no device.

    It stands by until the controller has it start an engine, on devices of any node, in processes there. Its
    engine gone, it ends, and Serve starts another one that stands by.

    Args:
        spec: an `AppSpec` as JSON.
        application: the Serve application's name, APP:REVISION.
    """

    async def __init__(self, spec: Mapping[str, Any], application: str) -> None:  # type: ignore[misc]  # Serve awaits it
        log_as_json()
        self.spec = AppSpec.from_json(spec)
        self.id = serve.get_replica_context().replica_tag
        self.revision = int(application.rpartition(":")[2])
        """The number of the revision whose weights it has."""
        self._node = ray.get_runtime_context().get_node_id()
        self._application = application
        self._state: Literal["standby", "starting", "ready", "ending"] = "standby"
        self._engine: EngineProcesses | None = None
        self._parked: ParkedEngine | None = None
        self._starting: asyncio.Task[None] | None = None
        self._engine_facts: dict[str, Any] = {}
        self._calls = 0
        self._prepared: int | None = None
        self._refused: int | None = None
        self._refusal: str | None = None
        self._failures, self._failure = 0, ""
        self._leaving: asyncio.Task[None] | None = None
        self._link = ControllerLink(application, self.id, self._facts, self._obey)
        self._watching = asyncio.create_task(self._watch())
        self._linked = asyncio.create_task(self._link.run())

    def _begin_start(self, order: Mapping[str, Any]) -> None:
        """Begin to have an engine, as the controller has ordered."""
        self.spec, self.revision = AppSpec.from_json(order["spec"]), order["revision"]
        self._engine_facts = {
            "engine_node": order["node"],
            "devices": order["devices"],
            "started_at": _now(),
            "ready_at": "",
            "woken": False,
            "not_woken": "",
        }
        self._state, self._began = "starting", time.monotonic()
        self._starting = asyncio.create_task(self._start(order))

    async def _start(self, order: Mapping[str, Any]) -> None:
        """Have an engine, or stand by again; what is wrong with it is reported."""
        seconds = self.spec.config.update.ready_timeout_s
        parked, self._parked = self._parked, None
        engine = self._new_engine(order["node"]) if parked is None else parked.engine
        try:
            async with asyncio.timeout(EARLY_S if order["early"] else seconds) as limit:

                def devices() -> Coroutine[Any, Any, dict[str, str]]:
                    return self._devices(order["devices"], limit, seconds)

                length = None if parked is None else await self._wake(parked, order["node"], devices())
                if length is None and parked is not None:
                    engine = self._new_engine(order["node"])
                if length is None:
                    parks = order["parks"]
                    length = await engine.start(self.spec, self.revision, devices(), parks)
                self._context_length = length
        except asyncio.CancelledError:  # it is not wanted any more
            await engine.stop(gently=False)
            self._state, self._engine_facts = "standby", {}
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            why = f"it was not ready within {seconds:g} s" if late else _words(error)
            logger.error("replica %s: its engine does not start: %s", self.id, why, exc_info=not late)
            await engine.stop(gently=False)
            self._failures, self._failure = self._failures + 1, why
            self._state, self._engine_facts = "standby", {}
        else:
            self._engine, self._ready = engine, time.monotonic()
            self._prepared = self._refused = self._refusal = None
            self._state, self._engine_facts["ready_at"] = "ready", _now()
        self._starting = None
        self._link.tell()

    def _new_engine(self, node: str) -> EngineProcesses:
        kind = find_engine(self.spec.engine).kind
        return EngineProcesses(
            self.id,
            ray.util.get_node_ip_address(),
            lambda whom: fork_on(node, whom, f"engine of {self._application}#{self.id}", kind),
            on_lost=self._lost,
            on_orphans=self._link.tell_orphans,
        )

    async def _wake(
        self, parked: ParkedEngine, node: str, devices: Coroutine[Any, Any, dict[str, str]]
    ) -> int | None:
        """Go on with a parked engine; what `EngineProcesses.wake` returns. None: it has ended, since it is
        another one than is wanted, or than it was."""
        try:
            if (parked.spec, parked.node) != (self.spec, node):
                devices.close()
                await parked.end()
                return None
            early = not self.spec.replica_resources.get("GPU")
            length = await parked.wake(self.revision, devices, early=early)
        except (EngineError, LineLostError, TimeoutError) as error:
            why = _words(error)
            logger.error("replica %s: its parked engine is ended, and another one started: %s", self.id, why)
            self._engine_facts["not_woken"] = why
            await parked.end()
            return None
        self._engine_facts["woken"] = True
        return length

    async def _devices(self, name: str, limit: asyncio.Timeout, seconds: float) -> dict[str, str]:
        """See `take_devices`; from then on the engine has so many seconds to be ready."""
        visible = await take_devices(name, self.spec.replica_resources.get("GPU", 0.0))
        limit.reschedule(asyncio.get_running_loop().time() + seconds)
        return visible

    async def _end(self, order: Mapping[str, Any]) -> None:
        """Give the engine's devices back, once its requests are answered; then this replica stands by again,
        with its engine parked where the order says so."""
        self._state = "ending"
        engine, self._engine = self._engine, None
        assert engine is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + self.spec.config.limits.request_timeout_s
        while self._calls and loop.time() < until:
            await asyncio.sleep(DRAIN_LOOK_S)
        if order["park"] is None or not await self._park(engine, order["park"]["most_bytes"]):
            await engine.stop()
        self._state, self._engine_facts = "standby", {}

    async def _park(self, engine: EngineProcesses, most_bytes: int | None) -> bool:
        """Keep an engine's weights; whether that could be."""
        try:
            taken = await engine.park(most_bytes)
        except (EngineError, LineLostError, TimeoutError) as error:
            logger.error("replica %s: its engine could not be parked: %s", self.id, _words(error))
            return False
        if taken is None:
            return False
        node = self._engine_facts["engine_node"]
        self._parked = ParkedEngine(engine, self.spec, self.revision, node, _now(), **taken)
        self._parked.watch(self._lose_parked)
        return True

    def _lose_parked(self, parked: ParkedEngine, why: str) -> None:
        """A parked engine has ended by itself: this replica stands by as others do."""
        if self._parked is parked:
            logger.error("replica %s: its parked engine is gone: %s", self.id, why)
            self._parked = None
            self._link.tell()

    def _lost(self, why: str) -> None:
        """End this replica, for good: half an engine answers nothing, and another replica stands by."""
        if self._leaving is None:
            logger.error("replica %s ends: %s", self.id, why)
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        # Soon: the router drops it as soon as it is gone, and gateways send elsewhere what it has.
        try:
            self._linked.cancel()
            async with asyncio.timeout(LEAVE_S):
                if self._engine is not None:
                    await self._engine.kill()
                await self._link.tell_end()
        except Exception:  # whatever it is: what it was sent must not wait here for ever
            logger.exception("replica %s ends without a word", self.id)
        finally:
            logging.shutdown()
            os._exit(1)

    async def _watch(self) -> None:
        watchdog = Watchdog(HANG_TIMEOUT_S)
        try:
            while True:
                watchdog.beat()
                # Counted in this loop's own steps: a machine that stood still as a whole is no reason.
                if self._engine is not None and self._engine.look() * WATCH_EVERY_S >= HANG_TIMEOUT_S:
                    self._lost(f"its engine was silent for {HANG_TIMEOUT_S:g} s")
                await asyncio.sleep(WATCH_EVERY_S)
        finally:
            watchdog.stop()

    def _facts(self) -> dict[str, Any]:
        """What the controller is told, see `ReplicaReport`."""
        facts: dict[str, Any] = {
            "node": self._node,
            "state": self._state,
            "failures": self._failures,
            "failure": self._failure,
            "revision": self.revision,
            "prepared": self._prepared,
            "refused": self._refused,
            "refusal": self._refusal,
            "devices": None,
            "ready_at": "",
            "silent_s": 0.0,
            "woken": False,
            "not_woken": "",
            "parked": None if self._parked is None else self._parked.facts(),
            **self._engine_facts,
        }
        if self._state == "starting":
            facts["silent_s"] = time.monotonic() - self._began
        if self._engine is None:
            return facts
        return {
            **facts,
            "context_length": self._context_length,
            "engine": self._engine.statistics,
            "ready_s": time.monotonic() - self._ready,
            "silent_s": self._engine.silent_looks * WATCH_EVERY_S,
        }

    async def _obey(self, order: Mapping[str, Any]) -> None:
        """Carry out an order; what cannot be done leaves what runs as it is."""
        action = order["action"]
        if action == "start" and self._state == "standby":
            self._begin_start(order)
        elif action == "end" and self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        elif action == "end" and self._engine is not None:
            await self._end(order)
        elif action == "discard" and self._parked is not None:
            parked, self._parked = self._parked, None
            await parked.end()
        elif action == "lose":
            self._lost("its engine's node does not answer")
        elif self._engine is not None:
            await self._take_weights(self._engine, order)

    async def _take_weights(self, engine: EngineProcesses, order: Mapping[str, Any]) -> None:
        """Get ready for another version of the model, or go on with it."""
        spec, number = order["spec"], order["revision"]
        try:
            if order["action"] == "prepare":
                await engine.call("prepare", spec)
                self._prepared = number
                return
            await engine.call("load", spec, number)
        except (WeightsError, EngineError, ShoalError, OSError) as error:
            self._refused, self._refusal = number, str(error)
            logger.error("replica %s cannot load revision %d: %s", self.id, number, error)
            if order.get("or_end"):
                self._lost("it cannot go back to the weights that it is to have")
            return
        self.spec, self.revision = AppSpec.from_json(spec), number
        self._refused = self._refusal = None

    async def statistics(self) -> dict[str, Any]:
        """The engine's statistics, the replica's id, its process (`pid`) and those of its ranks (`ranks`)."""
        own = {"replica": self.id, "pid": os.getpid()}
        if self._engine is None:
            return {**own, "ranks": []}
        return {**own, "ranks": self._engine.pids(), **await self._engine.call("statistics")}

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
        if self._engine is None:
            return self._nothing()  # whoever sent it knows soon that there is no engine here
        self._calls += 1
        try:
            answer: dict[str, Any] = await self._engine.call(method, *arguments)
        except LineLostError:
            self._lost("its engine is gone")
            answer = {"engine_broke": True}
        except CallEndedError:
            return self._nothing()  # to a gateway that is gone
        finally:
            self._calls -= 1
        if answer.get("engine_broke") and self._leaving is not None:
            # One that refuses at once whatever it is sent seems to have more room than the others; and who
            # has sent it would take this for one engine, and the end of this process for another.
            await asyncio.Event().wait()
        return answer

    def _nothing(self) -> dict[str, Any]:
        """The answer that another replica may do better than."""
        start = {"replica": self.id, "model_version": self.spec.model_version}
        return {"start": start, **replica_lost().as_item()}

    async def __del__(self) -> None:
        for name in ("_watching", "_linked", "_starting"):
            task = getattr(self, name, None)
            if task is not None:
                task.cancel()
        engine = getattr(self, "_engine", None)
        if engine is not None:
            await engine.stop()
        parked = getattr(self, "_parked", None)
        if parked is not None:
            await parked.end()


def _words(error: Exception) -> str:
    """What an exception says, and of what kind it is where that is not Shoal's."""
    said = str(error).strip()
    known = isinstance(error, EngineError | ShoalError | WeightsError | UnsupportedError)
    return said if known and said else f"{type(error).__name__}: {said}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
