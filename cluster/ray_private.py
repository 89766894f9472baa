"""What is private in Ray and the cluster package needs; a test for each fails when Ray changes it."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

_ALIVE = 0
"""Of GcsNodeInfo.GcsNodeState, in Ray's protocol."""
HEAD_RESOURCE = "node:__internal_head__"
"""The resource that the head has, and no other node."""
RAYLET = "raylet"
"""What the process is called that a node stands and falls with; `ray start` tells nobody its number."""

_TELLS = "ray_listen_error_messages"
"""The thread in which Ray prints what its own processes complain of."""


class _Stdout:
    """Standard output, where that thread's words go to standard error."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if threading.current_thread().name == _TELLS else self.kept, name)


def keep_stdout() -> None:
    """Have Ray's complaints come on standard error from now on.

    It prints them on the standard output of every process that has joined, also with `log_to_driver=False`:
    in the middle of a document.
    """
    if not isinstance(sys.stdout, _Stdout):
        sys.stdout = _Stdout(sys.stdout)


def give_stdout_back() -> None:
    """End `keep_stdout`."""
    if isinstance(sys.stdout, _Stdout):
        sys.stdout = sys.stdout.kept


def available_resources_by_node() -> dict[str, dict[str, float]]:
    """What is free now on each live node, by node id; needs a connection to the cluster.

    Ray has public calls for what each node has (`ray.nodes()`) and for what is free in the whole cluster
    (`ray.available_resources()`), none for what is free on each node.
    """
    from ray._private.state import available_resources_per_node

    return {node_id: dict(free) for node_id, free in available_resources_per_node().items()}


def draining_nodes() -> set[str]:
    """Ids of the nodes that are about to go: drained by somebody, or with a notice of preemption.

    Ray tells a training run of its own nodes (`ray.train.get_preemption_info`), and nobody of all of them.
    """
    from ray._private.state import state

    return set(state.get_draining_nodes())


def authentication_token() -> str | None:
    """The token that this process shows to Ray; None where Ray asks for none.

    Ray finds it in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token, and
    tells nobody which, nor whether RAY_AUTH_MODE, which it sets itself where there is one, has it used.
    """
    from ray._raylet import (  # type: ignore[attr-defined]
        AuthenticationMode,
        AuthenticationTokenLoader,
        get_authentication_mode,
    )

    if get_authentication_mode() != AuthenticationMode.TOKEN:
        return None
    return str(AuthenticationTokenLoader.instance().get_raw_token()) or None


def address_here() -> str | None:
    """HOST:PORT of the Ray cluster that RAY_ADDRESS names, or that this machine is a node of; None where
    there is none. `ray.init(address="auto")` looks in the same way, and tells nobody before it has joined."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        return None


def node_ids_by_address(address: str, timeout_s: float) -> dict[str, str]:
    """The ids of all nodes that are alive, asked without joining, which only a node's machine can.

    Args:
        address: HOST:PORT of Ray's control store, which answers.

    Raises:
        ray.exceptions.AuthenticationError: it asks for a token, or for another.
        ray.exceptions.RayError, RuntimeError: it does not say.
    """
    from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]

    if "RAY_AUTH_MODE" not in os.environ and AuthenticationTokenLoader.instance().has_token(
        ignore_auth_mode=True
    ):
        os.environ["RAY_AUTH_MODE"] = "token"  # `ray.init` takes a token for a reason to use it, too
        read_credentials_again()
    nodes = GcsClient(address=address).get_all_node_info(timeout=timeout_s)
    return {
        str(node.node_manager_address): each.hex() for each, node in nodes.items() if node.state == _ALIVE
    }


def read_credentials_again() -> None:
    """Make Ray go by RAY_AUTH_MODE and by the token as they are now.

    It reads the one when it is imported and the other at the first connection. A process that has imported
    it before, or joined another cluster, or the same one before it was started anew, waits 20 s in vain
    otherwise.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
