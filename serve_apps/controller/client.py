"""How commands talk to the controller of the apps, and how it is started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import start_on_head
from cluster.actors.named_actor import NamedActor, NoActorError
from cluster.errors import ShoalError
from serve_apps.controller.serve_keeper import StartGateway
from serve_apps.spec import CONTROLLER, AppSpec

CALL_TIMEOUT_S = 30.0


class ControllerClient:
    """A connection to the cluster's controller; needs a connection to the cluster (`ray.init`).

    Every call raises ShoalError when the controller does not answer in time.

    Raises:
        ShoalError: the cluster has none: nothing has been served on it yet.
    """

    def __init__(self) -> None:
        self._actor = NamedActor(CONTROLLER, NAMESPACE)
        try:
            self._actor.find()
        except NoActorError as error:
            raise ShoalError("nothing has been served on this cluster yet") from error

    @classmethod
    def find(cls) -> ControllerClient | None:
        """A connection, or None where nothing has been served yet."""
        try:
            return cls()
        except ShoalError:
            return None

    def apply(self, spec: AppSpec) -> int:
        """See `AppController.apply`."""
        return int(self._call("apply", spec.as_json()))

    def roll_back(self, name: str) -> int:
        """See `AppController.roll_back`."""
        # Done twice it would lead back again.
        return int(self._call("roll_back", name, once=True))

    def remove(self, name: str) -> None:
        """See `AppController.remove`."""
        self._call("remove", name)

    def leave(self) -> list[str]:
        """See `AppController.leave`."""
        names: list[str] = self._call("leave")
        return names

    def bring_up(self) -> None:
        """See `AppController.bring_up`."""
        self._call("bring_up")

    def serving(self) -> dict[str, Any]:
        """See `AppController.serving`."""
        serving: dict[str, Any] = self._call("serving")
        return serving

    def describe(self) -> dict[str, dict[str, Any]]:
        """See `AppController.describe`."""
        described: dict[str, dict[str, Any]] = self._call("describe")
        return described

    def outcome(self, name: str) -> dict[str, Any] | None:
        """See `AppController.outcome`."""
        outcome: dict[str, Any] | None = self._call("outcome", name)
        return outcome

    def end(self) -> None:
        """End the controller; what it has started goes on."""
        self._actor.end()

    def _call(self, method: str, *arguments: Any, once: bool = False) -> Any:
        try:
            return self._actor.call(method, *arguments, timeout_s=CALL_TIMEOUT_S, once=once)
        except NoActorError as error:
            raise ShoalError("the controller of the apps is gone; `shoal serve` starts it again") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ShoalError):
                raise error.cause from None
            raise ShoalError(f"the controller of the apps failed: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            message = f"the controller of the apps did not answer within {CALL_TIMEOUT_S:.0f} s"
            raise ShoalError(message) from error
        except ray.exceptions.RayError as error:
            raise ShoalError(f"the controller of the apps is gone ({error}); is the cluster up?") from error


def start_controller(info: Mapping[str, Any], start_gateway: StartGateway) -> None:
    """Start the controller on the head node and wait until it answers; one that runs is left alone.

    Args:
        start_gateway: see `StartGateway`; a function of a module, by whose name it is found on the head.

    Raises:
        ShoalError: it did not start in time.
    """
    runs = ControllerClient.find()
    if runs is not None:
        with suppress(ShoalError):  # one that is gone is started again
            runs.describe()
            return
    from serve_apps.controller.actor import AppController  # with Ray Serve, which takes seconds

    what = "the controller of the apps"
    start_on_head(
        AppController, CONTROLLER, NAMESPACE, dict(info), start_gateway, what=what, first_call="describe"
    )
