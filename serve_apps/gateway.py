"""The gateway as a Ray Serve deployment: it finds the apps through Serve and calls their replicas."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState

from cluster.api_keys import cluster_token, load_keys
from cluster.errors import RequestError
from serve_apps.app_table import AppTable, AppVersion
from serve_apps.choices import Item, ReplicaLostError
from serve_apps.gateway_access import Access
from serve_apps.gateway_api import build_api
from serve_apps.gateway_service import GatewayService
from serve_apps.http_server import HttpServer
from serve_apps.inbox import Inbox
from serve_apps.openai_errors import ApiError, unavailable
from serve_apps.spec import DEPLOYMENT, GATEWAY, AppSpec
from serve_apps.token_stream import TokenReceiver

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the gateway looks which apps there are."""
DESCRIBE_EVERY_S = 3.0
"""An app is asked what it serves at least this often."""
DESCRIBE_TIMEOUT_S = 5.0
EVENTS_PER_S = 1000.0
"""About how many events with tokens the gateway sends in a second, over all streams; beyond that, tokens that
came meanwhile go together."""
LONGEST_INTERVAL_S = 0.1
LAST_TOKENS_S = 10.0
"""How long the last tokens of an answer may take after the replica has finished it."""


@dataclass(frozen=True)
class _Described:
    """What an application said about itself, and when."""

    seen: tuple[float, bool]
    """When it was last deployed, and whether all of it ran then."""
    at: float
    spec: AppSpec
    context_length: int


class _RefusedError(Exception):
    """A replica's word that a request cannot be run, or broke."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        super().__init__(result["error"])
        self.result = result


class ServeApps:
    """The apps that Serve runs, with a handle to each; the truth is Serve's, nothing is kept elsewhere."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}
        self._known: dict[str, _Described] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        """All three by Serve application."""
        self._lock = asyncio.Lock()
        self._receiver = TokenReceiver(ray.util.get_node_ip_address())
        self._receiving = asyncio.create_task(self._receiver.run())
        self._calls: set[asyncio.Task[None]] = set()
        self._streams = 0

    def check(self) -> None:
        """Raise when no tokens are received any more."""
        if self._receiving.done():
            self._receiving.result()

    async def look_up(self) -> AppTable:
        """The table as it is now."""
        async with self._lock:
            overviews = (await asyncio.to_thread(serve.status)).applications
            apps = {
                name: overview
                for name, overview in overviews.items()
                # One that is being deleted takes no new request; those in it finish.
                if name != GATEWAY
                and DEPLOYMENT in overview.deployments
                and overview.status != ApplicationStatus.DELETING
            }
            for gone in self._handles.keys() - apps.keys():
                del self._handles[gone]
                self._known.pop(gone, None)
            described = [await self._version(name, overview) for name, overview in apps.items()]
            versions = {v.spec.name: (v,) for v in described if v is not None}
            return AppTable(MappingProxyType(versions), frozenset(apps.keys() - versions.keys()))

    async def _version(self, application: str, overview: ApplicationStatusOverview) -> AppVersion | None:
        states = overview.deployments[DEPLOYMENT].replica_states
        replicas = states.get(ReplicaState.RUNNING, 0)
        if application not in self._handles:
            self._handles[application] = await asyncio.to_thread(
                serve.get_deployment_handle, DEPLOYMENT, app_name=application
            )
        # An update is complete when the application runs again; until then an old replica may answer, and
        # for a moment after it too: what is known is asked for again and again.
        seen = (overview.last_deployed_time_s, overview.status == ApplicationStatus.RUNNING)
        known = self._known.get(application)
        due = known is None or known.seen != seen or time.monotonic() - known.at >= DESCRIBE_EVERY_S
        if due and replicas and application not in self._asking:
            # Beside the table, since a replica whose batch is full answers late.
            task = self._asking[application] = asyncio.create_task(self._describe(application, seen))
            task.add_done_callback(lambda _: self._asking.pop(application))
            if known is None:
                await asyncio.wait({task}, timeout=POLL_S)
                known = self._known.get(application)
        if known is None:
            return None
        created = int(overview.last_deployed_time_s)
        return AppVersion(application, known.spec, known.context_length, created, replicas, replicas > 0)

    async def _describe(self, application: str, seen: tuple[float, bool]) -> None:
        """Ask a replica of an application what it serves."""
        handle = self._handles[application]
        try:
            facts = await asyncio.wait_for(handle.describe.remote(), DESCRIBE_TIMEOUT_S)
        except (TimeoutError, RayServeException, ray.exceptions.RayError) as error:
            logger.warning("%s did not say what it serves, asking again: %r", application, error)
            return
        if self._handles.get(application) is handle:  # else it was taken down meanwhile
            spec = AppSpec.from_json(facts["spec"])
            self._known[application] = _Described(seen, time.monotonic(), spec, facts["context_length"])

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        """Run one request on a replica, see Backend.generate."""
        handle = self._handles.get(application)
        if handle is None:
            raise unavailable(f"The model '{application}' is being taken down.")
        if not request["streamed"]:
            yield await self._call(application, handle.options(method_name="generate"), request)
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
        handle = self._handles.get(application)
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
        except (ReplicaLostError, ApiError) as error:
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
        except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as error:
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
        self._keys = keys
        self._service = GatewayService(
            self._apps, self._apps.look_up, Access(None if keys is None else load_keys(keys), cluster_token())
        )
        self._poll = asyncio.create_task(self._follow())
        self._server = HttpServer(build_api(self._service), host, port)
        await self._server.start()

    async def check_health(self) -> None:
        """Raise when the gateway no longer follows what Serve runs, or receives no tokens."""
        self._apps.check()
        self._server.check()
        if self._poll.done():
            self._poll.result()
            raise RuntimeError("the gateway does not follow the apps any more")

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            await server.stop()

    def _read_keys(self) -> None:
        """Take over what changed in the key file; one that is wrong changes nothing."""
        if self._keys is not None:
            try:
                self._service.access.keys = load_keys(self._keys)
            except RequestError as error:
                logger.warning("keeping the keys as they were: %s", error)

    async def _follow(self) -> None:
        while True:
            await asyncio.to_thread(self._read_keys)
            try:
                self._service.table = await self._apps.look_up()
            except (RayServeException, ray.exceptions.RayError, TimeoutError) as error:
                # Without the controller the last table stays right: it is the one that changes things.
                logger.warning("the list of apps could not be read, keeping the last one: %r", error)
            await asyncio.sleep(POLL_S)
