"""Actors of which a cluster has one, on its head node, for as long as it is up."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ray

from cluster.errors import ShoalError
from cluster.ray_private import HEAD_RESOURCE

START_TIMEOUT_S = 60.0


def start_on_head(kind: type, name: str, namespace: str, *arguments: Any, what: str, first_call: str) -> Any:
    """Start a detached actor and wait until it answers; one of this name that runs is left alone. See
    `begin_on_head`.

    Returns:
        what the first call answers.

    Raises:
        ShoalError: it did not start in time.
    """
    return begin_on_head(kind, name, namespace, *arguments, what=what, first_call=first_call)()


def begin_on_head(
    kind: type, name: str, namespace: str, *arguments: Any, what: str, first_call: str
) -> Callable[[], Any]:
    """Have a detached actor started, while one waits for others.

    Needs a connection to the cluster (`ray.init`). Every method of the actor must be one that may be called
    twice without harm, or be called without retries: a call that meets a restart is repeated.

    Args:
        what: what it is, for messages.
        first_call: a method without arguments, by whose answer it is known to run.

    Returns:
        what waits until it answers; see `start_on_head`.

    Raises:
        ShoalError: Ray names no head.
    """
    if not any(row["Alive"] and HEAD_RESOURCE in row["Resources"] for row in ray.nodes()):
        raise ShoalError(f"{what} was not started: Ray names no head node that is alive")
    actor: Any = (
        ray.remote(kind)
        .options(
            name=name,
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            # Not by the head's id: where the control store outlives the head (Redis), the next head has
            # another, and whoever was held to the old one would never start again.
            resources={HEAD_RESOURCE: 0.001},
        )
        .remote(*arguments)
    )
    answer = getattr(actor, first_call).remote()

    def wait() -> Any:
        try:
            return ray.get(answer, timeout=START_TIMEOUT_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
            raise ShoalError(f"{what} did not start within {START_TIMEOUT_S:.0f} s: {error}") from error

    return wait


def was_restarted() -> bool:
    """Whether the actor that asks in its constructor has been there before, and died."""
    with warnings.catch_warnings():
        # Inside, Ray reads a property of its own that it has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def as_here(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a cluster as they hold on the head that the actor that asks is on now.

    Ray makes an actor anew with what it was told at first; by then the head may be another host.
    """
    return with_head_at(facts, ray.util.get_node_ip_address())


def with_head_at(facts: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Facts with the head at this address.

    Args:
        facts: `head_ip` is its former address, which others may name as HOST, as HOST:PORT or in a URL.
    """
    former = re.escape(facts["head_ip"])
    named = re.compile(rf"(^|//\[?|^\[){former}(?=$|[\]:/])")

    def moved(value: Any) -> Any:
        return named.sub(rf"\g<1>{address}", value) if isinstance(value, str) else value

    return {name: moved(value) for name, value in facts.items()}
