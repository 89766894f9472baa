"""Which Serve runs on the cluster now: private in Ray, whose processes keep to the one they once found."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ShoalError


class NoServeError(ShoalError):
    """Serve does not run on this cluster now."""


@dataclass(frozen=True)
class ServeInstance:
    """One Serve, from its start until it is shut down; a new process of its controller is no end of it."""

    id: str
    """No other has it, not even one that is started after this one."""
    host: str | None
    """Where its proxies listen."""
    port: int


def find_serve() -> ServeInstance | None:
    """The Serve that runs now, to which this process's calls of `ray.serve` go from now on; None: none runs.

    A process keeps its client of Serve's controller for ever. After somebody has shut Serve down every call
    with it fails, also when another Serve has been started; what Serve's `start` and `shutdown` do about that
    is done here, without starting or ending anything.

    Raises:
        ray.exceptions.RayError: it is just ending.
    """
    import ray
    from ray.serve import context

    if not ray.is_initialized():
        return None  # Serve would start a cluster of its own
    client, _ = context._check_cached_client_alive()
    if client is None:
        client = context._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    options = client.http_config
    return ServeInstance(client._controller._actor_id.hex(), options.host, options.port)
