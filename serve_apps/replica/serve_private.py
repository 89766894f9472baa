"""Which Serve runs on the cluster now, and that nobody waits for its proxies: private in Ray, whose processes
keep to the Serve that they once found."""

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


def wait_for_no_proxies() -> None:
    """Have `serve.run_many` in this process return once the Serve that was found has the application.

    Else it waits, whatever it is told, until all of Serve's own proxies listen: for a minute where one hangs.
    Applications without a route do not need them.
    """
    from ray.serve import context

    client = context._global_client
    if client is not None:
        client.wait_for_proxies_serving = _wait_for_nothing


def _wait_for_nothing(wait_for_applications_running: bool = True) -> None:
    """In the place of the client's method of these arguments."""
