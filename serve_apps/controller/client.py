"""How commands talk to the controller of the apps, and how it is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from cluster.errors import ShoalError
from cluster.head_actor import start_on_head
from serve_apps.spec import CONTROLLER, NAMESPACE, AppSpec

CALL_TIMEOUT_S = 30.0


class ControllerClient:
    """A connection to the cluster's controller; needs a connection to the cluster (`ray.init`).

    Every call raises ShoalError when the controller does not answer in time.

    Raises:
        ShoalError: the cluster has none: nothing has been served on it yet.
    """

    def __init__(self) -> None:
        try:
            self._actor = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        except ValueError as error:
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
        return int(self._call("roll_back", name, max_task_retries=0))

    def remove(self, name: str) -> None:
        """See `AppController.remove`."""
        self._call("remove", name)

    def describe(self) -> dict[str, dict[str, Any]]:
        """See `AppController.describe`."""
        described: dict[str, dict[str, Any]] = self._call("describe")
        return described

    def outcome(self, name: str) -> dict[str, Any] | None:
        """See `AppController.outcome`."""
        outcome: dict[str, Any] | None = self._call("outcome", name)
        return outcome

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            call = getattr(self._actor, method).options(**options)
            return ray.get(call.remote(*arguments), timeout=CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ShoalError):
                raise error.cause from None
            raise ShoalError(f"the controller of the apps failed: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            message = f"the controller of the apps did not answer within {CALL_TIMEOUT_S:.0f} s"
            raise ShoalError(message) from error
        except ray.exceptions.RayError as error:
            raise ShoalError(f"the controller of the apps is gone ({error}); is the cluster up?") from error


def start_controller(info: Mapping[str, Any]) -> None:
    """Start the controller on the head node and wait until it answers; one that runs is left alone.

    Raises:
        ShoalError: it did not start in time.
    """
    from serve_apps.controller.actor import AppController

    what = "the controller of the apps"
    start_on_head(AppController, CONTROLLER, NAMESPACE, dict(info), what=what, first_call="describe")
