"""The gateway's backend: the apps' replicas, called through Serve's handles."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Set
from typing import Any

import ray
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor
from cluster.errors import ShoalError
from cluster.wording import logs_of
from serve_apps.gateway.backend import ReplicaLostError
from serve_apps.http.request_record import client_id
from serve_apps.openai.errors import internal, unavailable
from serve_apps.replica.handles import ReplicaHandles
from serve_apps.replica.serve_private import find_serve
from serve_apps.spec import CONTROLLER
from serve_apps.tokens.inbox import Inbox, Item
from serve_apps.tokens.stream import TokenReceiver

logger = logging.getLogger(__name__)

EVENTS_PER_S = 1000.0
"""About how many events with tokens the gateway sends in a second, over all streams; beyond that, tokens that
came meanwhile go together."""
LONGEST_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 0.5
LAST_TOKENS_S = 10.0
"""How long the last tokens of an answer may take after the replica has finished it."""


class _RefusedError(Exception):
    """A replica's word that a request cannot be run, or broke."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        super().__init__(result["error"])
        self.result = result


class ReplicaBackend:
    """The apps' replicas, by a handle to each Serve application."""

    def __init__(self, token_ports: tuple[int, int] | None = None) -> None:
        self._handles = ReplicaHandles()
        self._serve = ""
        self._receiver = TokenReceiver(ray.util.get_node_ip_address(), token_ports)
        self._receiving = asyncio.create_task(self._receiver.run())
        self._calls: set[asyncio.Task[None]] = set()
        self._streams = 0
        self._controller = NamedActor(CONTROLLER, NAMESPACE)

    def check(self) -> None:
        """Raise when no tokens are received any more."""
        if self._receiving.done():
            self._receiving.result()

    async def connect(self, applications: Set[str], serve: str) -> None:
        """Be ready for requests to these Serve applications; the others are gone.

        Args:
            serve: the id of the Serve that they are of; empty: none runs now.
        """
        if not serve:
            return  # what there was of the last one may answer still
        if serve != self._serve:
            try:
                found = await asyncio.to_thread(find_serve)
            except ray.exceptions.RayError as error:
                logger.warning("Serve is just ending: %s", error)
                return
            if found is None or found.id != serve:
                return  # it has changed again; the next table says to which
            self._serve = serve
        self._handles.connect(applications, serve)

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

    async def kept(self, application: str, request: str, wait_s: float) -> Mapping[int, str]:
        """See Backend.kept; nothing where nobody answers."""
        try:
            found: Mapping[int, str] = await self._controller.ask(
                "desk",
                "find_orphan",
                (application, request, wait_s),
                {},
                timeout_s=wait_s + ANSWER_TIMEOUT_S,
            )
        except (ShoalError, ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("what a gateway has left is not known: %s", error)
            return {}
        return found

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
            app, client = application.rpartition(":")[0], client_id(request["request_id"])
            raise internal(f"The replica failed; {logs_of(app, request=client)} says why.") from error
        finally:
            if not done:
                response.cancel()

    def _interval_s(self) -> float:
        """Time between two events of one stream, so that all together stay below EVENTS_PER_S."""
        return min(LONGEST_INTERVAL_S, self._streams / EVENTS_PER_S)
