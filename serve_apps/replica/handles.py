"""Handles to the replicas of Serve applications: one each in a process, until the application is gone.

Not by Serve's documented `get_deployment_handle`, which keeps what it has made for as long as the process
lives: such a handle tells Serve's controller twice a second what load an application has that is gone. The
constructor and `shutdown_async` of the public class are what that function and Serve's shutdown use.

A second handle to an application may never learn by which policy its requests are to be routed, and let
them wait for ever: what the first one has received is not sent to the process again, and the news that
replicas have started can take the place of what the second one asks for itself (Ray 2.60,
`SharedRouterLongPollClient`). So there is one, and no application has the name of an earlier one: the numbers
of an app's revisions go on.

A handle hears of replicas from the controller of one Serve. When that has been shut down and another one has
been started, all handles are made anew: what the old ones have received is of the old controller alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from serve_apps.spec import DEPLOYMENT

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class ReplicaHandles:
    """The handles of this process."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        """By Serve application."""
        self._serve = ""
        self._released: set[asyncio.Task[None]] = set()

    def connect(self, applications: Set[str], serve: str) -> None:
        """Have a handle to each of these applications; the others are gone for ever.

        What is in flight at one that is released goes on.

        Args:
            serve: the id of the Serve that they are of, which this process has found (see `find_serve`).
        """
        from ray.serve.handle import DeploymentHandle

        if serve != self._serve:
            self._serve = serve
            self._release(set(self._handles))
        self._release(self._handles.keys() - applications)
        for name in applications - self._handles.keys():
            self._handles[name] = DeploymentHandle(DEPLOYMENT, name)

    def find(self, application: str) -> DeploymentHandle[Any] | None:
        """The handle to an application; None: it is gone."""
        return self._handles.get(application)

    def _release(self, names: Set[str]) -> None:
        for name in names:
            # It waits for the next of its reports, for which nobody here has to wait.
            task = asyncio.create_task(self._handles.pop(name).shutdown_async())
            self._released.add(task)
            task.add_done_callback(self._released.discard)
