"""Actors that are called by their name: whoever has it now, whatever became of the one before.

A handle of Ray's is of one actor. When that is dead for good (with its node or its owner, by `ray.kill`, or
because what it belongs to was shut down), the handle stays dead, also when another actor has come under the
same name.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.errors import ShoalError

NOTICE_S = 2.0
"""How long the name of an actor that has died may lead to it still."""
LOOK_EVERY_S = 0.05


class NoActorError(ShoalError):
    """Nobody has the name now."""


class NamedActor:
    """An actor by its name. Not tied to a thread; needs a connection to the cluster (`ray.init`).

    A call of one that dies is repeated with the one that has its name then, if there is one: such actors have
    only methods that may be called twice, but for those that are called with `once`. While Ray restarts an
    actor, calls wait for it.

    Args:
        namespace: Ray's, of the name.
    """

    def __init__(self, name: str, namespace: str = NAMESPACE) -> None:
        self.name = name
        self._namespace = namespace
        self._handle: Any = None

    def find(self) -> Any:
        """The handle of who has the name, for calls that nobody waits for.

        Raises:
            NoActorError: nobody has it.
            ShoalError: this process is connected to no cluster.
        """
        handle = self._handle
        if handle is None:
            if not ray.is_initialized():  # Ray would start a cluster of its own to look in
                raise ShoalError(f"{self.name} cannot be asked: this process is connected to no cluster")
            try:
                handle = self._handle = ray.get_actor(self.name, namespace=self._namespace)
            except ValueError as error:
                raise NoActorError(f"no actor is called {self.name} on this cluster now") from error
        return handle

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method and wait for nothing; where nobody has the name, nobody hears of it."""
        with suppress(NoActorError):
            getattr(self.find(), method).remote(*arguments)

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float | None,
        once: bool = False,
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Call a method and wait for its answer.

        Args:
            named: arguments by name.
            timeout_s: for all of it; None waits for ever.
            once: a call that may have been carried out is not repeated.

        Raises:
            NoActorError: nobody has the name.
            ray.exceptions.GetTimeoutError: no answer in time.
            ray.exceptions.RayError: it died, and nobody has taken its name; or the method raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = threading.Event()
        while True:
            handle = self.find()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return ray.get(_bound(handle, method, once).remote(*arguments, **named), timeout=left)
            except ray.exceptions.ActorDiedError as error:
                self.forget(handle)
                if once or isinstance(error, ray.exceptions.RayTaskError):  # the method's own error
                    raise
                until = time.monotonic() + NOTICE_S
                while not self._another(handle):
                    if time.monotonic() >= until:
                        raise
                    pause.wait(LOOK_EVERY_S)

    async def ask(self, method: str, *arguments: Any, timeout_s: float, once: bool = False) -> Any:
        """The same as `call`, in an event loop.

        Args:
            once: a call that may have been carried out is not repeated. Those that are held until there is
                news are called so, too: Ray tells people of each that it repeats.

        Raises:
            NoActorError, ray.exceptions.RayError: see `call`.
            TimeoutError: no answer in time.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                handle = self._handle or await asyncio.to_thread(self.find)
                try:
                    return await _bound(handle, method, once).remote(*arguments)
                except ray.exceptions.ActorDiedError as error:
                    self.forget(handle)
                    if once or isinstance(error, ray.exceptions.RayTaskError):
                        raise
                    until = time.monotonic() + NOTICE_S
                    while not await asyncio.to_thread(self._another, handle):
                        if time.monotonic() >= until:
                            raise
                        await asyncio.sleep(LOOK_EVERY_S)

    def end(self) -> None:
        """End whoever has the name now, for good; nothing happens where nobody has it."""
        with suppress(NoActorError):
            ray.kill(self.find(), no_restart=True)
        self._handle = None

    def forget(self, handle: Any) -> None:
        """Look the name up again at the next call, unless that has been done since."""
        if self._handle is handle:
            self._handle = None

    def _another(self, dead: Any) -> bool:
        """Whether somebody else has the name now."""
        try:
            found = self.find()
        except NoActorError:
            return False
        if found == dead:
            self.forget(found)
            return False
        return True


def _bound(handle: Any, method: str, once: bool) -> Any:
    bound = getattr(handle, method)
    return bound.options(max_task_retries=0) if once else bound
