"""Serving apps through the control API: served, changed back, taken down."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from cluster.config.loader import mistakes_of_app
from cluster.config.sections.cluster import ClusterConfig, NodeConfig
from cluster.config.sections.serve import ServeAppConfig
from cluster.errors import ConfigError, RequestError, ShoalError
from cluster.sharing.client import BrokerClient

LOOK_EVERY_S = 0.2
SERVE_START_S = 120.0


class Apps:
    """The apps of a cluster; needs a connection to it (`ray.init`). Not tied to a thread.

    Args:
        cluster: its section of the config, paths resolved.
        nodes: what there is to run on.
    """

    def __init__(self, cluster: ClusterConfig, nodes: Callable[[], tuple[NodeConfig, ...]]) -> None:
        self._cluster = cluster
        self._nodes = nodes

    def apply(self, name: str, config: ServeAppConfig) -> dict[str, Any]:
        """Serve an app, or change the one that is there.

        Returns:
            {"name", "number", "base_url"}: `number` of the rollout that was begun, None where it runs so
            already.

        Raises:
            ConfigError: it does not fit the nodes, or its model is not there.
            ShoalError: Serve or the gateway could not be started.
        """
        from serve_apps.commands import begin_to_deploy, start_serve
        from serve_apps.controller.client import ControllerClient
        from serve_apps.models import find_model

        mistakes = mistakes_of_app(name, config, self._cluster, self._nodes())
        if mistakes:
            raise ConfigError(mistakes)
        info = BrokerClient().info()
        spec = find_model(name, config, info["storage"])
        start_serve(info, time.monotonic() + SERVE_START_S)
        number = begin_to_deploy(ControllerClient(), spec)
        return {"name": name, "number": number, "base_url": info["gateway_url"]}

    def roll_back(self, name: str) -> dict[str, Any]:
        """Bring back what an app served before.

        Returns:
            {"name", "number"} of the rollout that was begun.

        Raises:
            RequestError: no such app, or nothing to go back to.
        """
        from serve_apps.controller.client import ControllerClient

        controller = ControllerClient.find()
        if controller is None:
            raise RequestError(f"no app '{name}' is served; none runs")
        return {"name": name, "number": controller.roll_back(name)}

    def remove(self, name: str) -> dict[str, Any]:
        """Take an app down: requests that run are finished first. It is gone when it is not listed any more.

        Raises:
            RequestError: it is not there.
        """
        from serve_apps.commands import begin_to_remove

        begin_to_remove([name])
        return {"name": name}

    async def follow(self, name: str, number: int, back: bool) -> AsyncIterator[ServerSentEvent]:
        """How a rollout goes: `note` for each sentence; at last `end` with the app's row, or `failed`.

        Args:
            back: it is one that goes back.
        """
        from serve_apps.controller.client import ControllerClient
        from serve_apps.controller.following import RolloutFollower
        from serve_apps.status import app_statuses

        def find() -> RolloutFollower:
            return RolloutFollower(ControllerClient(), name, number, back=back)

        def row() -> dict[str, Any] | None:
            return next((each for each in app_statuses() if each["name"] == name), None)

        try:
            follower = await run_in_threadpool(find)
            ended = False
            while not ended:
                said, ended = await run_in_threadpool(follower.look)
                for sentence in said:
                    yield ServerSentEvent(event="note", data={"text": sentence})
                if not ended:
                    await anyio.sleep(LOOK_EVERY_S)
            yield ServerSentEvent(event="end", data=await run_in_threadpool(row))
        except ShoalError as error:
            yield ServerSentEvent(event="failed", data={"message": str(error)})
