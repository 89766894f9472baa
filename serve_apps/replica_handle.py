"""A handle to the replicas of one Serve application, until it is released.

Not by Serve's documented `get_deployment_handle`, which keeps what it has made for as long as the process
lives: such a handle tells Serve's controller twice a second what load an application has that is gone.
One that comes later under the same name gets that handle again, and is routed to by the policy of the first.
The constructor and `shutdown_async` of the public class are what that function and Serve's shutdown use.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from serve_apps.spec import DEPLOYMENT

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_released: set[asyncio.Task[None]] = set()


def replica_handle(application: str) -> DeploymentHandle[Any]:
    """A handle of its own, which knows nothing of earlier applications of this name."""
    from ray.serve.handle import DeploymentHandle

    return DeploymentHandle(DEPLOYMENT, application)


def release(handle: DeploymentHandle[Any]) -> None:
    """Have a handle tell Serve nothing any more; what it has in flight goes on."""
    # It waits for the next of its reports, for which nobody here has to wait.
    task = asyncio.create_task(handle.shutdown_async())
    _released.add(task)
    task.add_done_callback(_released.discard)
