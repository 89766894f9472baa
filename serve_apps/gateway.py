"""The gateway as a Ray Serve deployment: it calls the replicas of the apps, as the controller says."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import suppress
from typing import Any

import ray
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from cluster.api_keys import cluster_token, load_keys
from cluster.errors import RequestError
from serve_apps.app_table import AppTable
from serve_apps.backend import ReplicaLostError
from serve_apps.controller.names import CONTROLLER, NAMESPACE
from serve_apps.gateway_access import Access
from serve_apps.gateway_api import build_api
from serve_apps.gateway_service import GatewayService
from serve_apps.http_server import HttpServer
from serve_apps.inbox import Inbox, Item
from serve_apps.openai_errors import ApiError, unavailable
from serve_apps.replica_handles import ReplicaHandles
from serve_apps.token_stream import TokenReceiver
from serve_apps.watchdog import show_life

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the gateway asks for the apps where the controller does not answer, and reads its keys."""
LOOK_AT_MOST_EVERY_S = 0.05
"""However many requests name a model that is not there."""
ANSWER_TIMEOUT_S = 5.0
FIRST_LOOK_EVERY_S = 0.05
FIRST_TABLE_S = 10.0
"""How long a gateway that starts waits for the apps before it listens: until then connections are refused,
which clients try again; afterwards requests are answered with 503."""
EVENTS_PER_S = 1000.0
"""About how many events with tokens the gateway sends in a second, over all streams; beyond that, tokens that
came meanwhile go together."""
LONGEST_INTERVAL_S = 0.1
HANG_TIMEOUT_S = 10.0
"""A gateway whose event loop stands still for so long is killed, and comes back."""
LAST_TOKENS_S = 10.0
"""How long the last tokens of an answer may take after the replica has finished it."""


class _RefusedError(Exception):
    """A replica's word that a request cannot be run, or broke."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        super().__init__(result["error"])
        self.result = result


class ServeApps:
    """The apps' replicas, by a handle to each Serve application."""

    def __init__(self) -> None:
        self._handles = ReplicaHandles()
        self._receiver = TokenReceiver(ray.util.get_node_ip_address())
        self._receiving = asyncio.create_task(self._receiver.run())
        self._calls: set[asyncio.Task[None]] = set()
        self._streams = 0

    def check(self) -> None:
        """Raise when no tokens are received any more."""
        if self._receiving.done():
            self._receiving.result()

    def connect(self, applications: Set[str]) -> None:
        """Be ready for requests to these Serve applications; the others are gone."""
        self._handles.connect(applications)

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        """Run one request on a replica, see Backend.generate."""
        handle = self._handles.find(application)
        if handle is None:
            raise unavailable(f"The model '{application}' is being taken down.")
        if not request["streamed"]:
            generate = handle.options(method_name="generate")
            yield await self._call(application, generate, request, self._receiver.address.as_json())
            return
        # Nobody else can write to this answer who does not know its key.
        request = {**request, "request_id": f"{request['request_id']}-{uuid.uuid4().hex}"}
        key = request["request_id"]
        inbox = Inbox(self._interval_s)
        self._receiver.open(key, inbox)
        call = asyncio.create_task(self._follow(application, handle, request, inbox))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        self._streams += 1
        complete = False
        try:
            while not complete:
                item = await inbox.get()
                complete = item.get("finish_reason") is not None
                yield item
        except _RefusedError as refused:
            yield refused.result
        finally:
            self._streams -= 1
            self._receiver.close(key)
            if not complete:
                call.cancel()

    async def ask(self, application: str, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """One call of a replica, see Backend.ask."""
        handle = self._handles.find(application)
        if handle is None:
            raise unavailable(f"The model '{application}' is being taken down.")
        return await self._call(application, handle.options(method_name=method), request)

    async def _follow(
        self, application: str, handle: DeploymentHandle, request: Mapping[str, Any], inbox: Inbox
    ) -> None:
        """Wait for the end of a call whose tokens arrive elsewhere."""
        try:
            generate = handle.options(method_name="generate")
            result = await self._call(application, generate, request, self._receiver.address.as_json())
            if "error" in result:
                inbox.fail(_RefusedError(result))
                return
            async with asyncio.timeout(LAST_TOKENS_S):
                await inbox.ended()
        except TimeoutError:
            inbox.fail(ReplicaLostError("the last tokens of the answer did not arrive"))
        except Exception as error:  # noqa: BLE001 - raised again for whoever reads the inbox
            inbox.fail(error)

    async def _call(
        self, application: str, method: DeploymentHandle, request: Mapping[str, Any], *more: Any
    ) -> dict[str, Any]:
        """One call of a replica; cancelling it ends the request there."""
        response = method.remote(dict(request), *more)
        done = False
        try:
            result: dict[str, Any] = await response
            done = True
            return result
        except ray.exceptions.RayActorError as error:
            done = True
            # One that is out of reach, or has to leave its node, is not broken.
            away = isinstance(error, ray.exceptions.ActorUnavailableError) or error.preempted
            broken = None if away else error.actor_id or f"one of {application}"
            raise ReplicaLostError(str(error), broken) from error
        except (
            ray.exceptions.NodeDiedError,
            # A long answer, which was still on the node that has died.
            ray.exceptions.ObjectLostError,
        ) as error:
            done = True
            raise ReplicaLostError(str(error)) from error
        except (RequestCancelledError, ray.exceptions.TaskCancelledError) as error:
            # Nobody here cancels what it still reads: the replica was shut down under the request.
            raise ReplicaLostError(str(error)) from error
        except DeploymentUnavailableError as error:
            done = True
            raise unavailable(f"The model '{application}' cannot be started: {error}") from error
        except ray.exceptions.RayTaskError as error:
            done = True
            logger.exception("a replica of %s failed", application)
            raise ApiError(
                500, "The replica failed; see its log.", kind="server_error", code="internal_error"
            ) from error
        finally:
            if not done:
                response.cancel()

    def _interval_s(self) -> float:
        """Time between two events of one stream, so that all together stay below EVENTS_PER_S."""
        return min(LONGEST_INTERVAL_S, self._streams / EVENTS_PER_S)


class Gateway:
    """The Serve deployment's class. One replica serves all apps.

    It listens itself: through Serve's proxy a request costs twice as much, and a token a message of Ray's.

    Args:
        host, port: where it listens.
        keys: where its API keys are, see `load_keys`; None lets everyone in.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, host: str, port: int, keys: str | None = None
    ) -> None:
        self._apps = ServeApps()
        self._id = uuid.uuid4().hex
        self._controller: Any = None
        self._keys = keys
        self._service = GatewayService(
            self._apps, self._look_up, Access(None if keys is None else load_keys(keys), cluster_token())
        )
        self._looking = asyncio.Lock()
        self._looked_at = 0.0
        self._pause_s = POLL_S
        self._polls = [asyncio.create_task(self._follow())]
        if keys is not None:
            self._polls.append(asyncio.create_task(self._read_keys()))
        self._server = HttpServer(build_api(self._service), host, port)
        await self._first_table()
        await self._server.start()
        self._polls.append(asyncio.create_task(show_life(HANG_TIMEOUT_S)))

    async def check_health(self) -> None:
        """Raise when the gateway no longer follows what Serve runs, or receives no tokens."""
        self._apps.check()
        self._server.check()
        for poll in self._polls:
            if poll.done():
                poll.result()
                raise RuntimeError("the gateway does not follow the apps any more")

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            await server.stop()

    async def _read_keys(self) -> None:
        """Take over what changes in the key file; one that is wrong changes nothing."""
        said = ""
        while self._keys is not None:
            await asyncio.sleep(POLL_S)
            try:
                self._service.access.keys = await asyncio.to_thread(load_keys, self._keys)
                said = ""
            except RequestError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("keeping the keys as they were: %s", error)

    async def _look_up(self) -> AppTable:
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
                if self._controller is None:
                    self._controller = await asyncio.to_thread(ray.get_actor, CONTROLLER, namespace=NAMESPACE)
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await self._controller.follow.remote(self._id, traffic.report())
            except (ValueError, ray.exceptions.RayError, TimeoutError) as error:
                # The last table stays right: the controller is the one that changes things.
                self._controller, self._pause_s = None, POLL_S
                raise unavailable(f"The list of models cannot be read: {error}") from error
            self._pause_s = answer["poll_s"]
            if "apps" in answer:
                table = AppTable.from_json(answer["number"], answer["apps"])
                self._apps.connect(table.applications)
                self._service.table = table
            if self._service.table is None:
                # A controller that comes back has not heard of everybody yet.
                raise unavailable("The list of models is not known yet; try again in a moment.")
            return traffic.table

    async def _first_table(self) -> None:
        """Wait until the apps are known, though not for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TABLE_S):
                while self._service.table is None:
                    await asyncio.sleep(FIRST_LOOK_EVERY_S)

    async def _follow(self) -> None:
        while True:
            try:
                await self._look_up()
            except ApiError as error:
                logger.warning("keeping the apps as they were: %s", error.message)
            await asyncio.sleep(self._pause_s)
