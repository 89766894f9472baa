"""Collectives across the replica groups of a view; whoever waits in one can be told to give up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, Work
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL


class Exchange:
    """All-reduces of one rank with its peers in the other groups, over torchft's process groups.

    A failure is remembered and not raised: what is reduced afterwards is of no use, and the step is done
    again under another view.

    Args:
        timeout_s: longest that a collective may take.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroup | None = None
        self._given_up = threading.Event()
        self._meeting = False
        self._waiting: list[threading.Event] = []
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """Why collectives of this view are of no use any more."""

    def configure(self, store: str, name: str, index: int, size: int) -> None:
        """Meet the peers of a new view; what went on before is left behind.

        Args:
            store: HOST:PORT/PREFIX of a TCPStore, the prefix being new to it.
            name: of this rank, for logs.
        """
        self._leave_behind()
        self._given_up = threading.Event()
        self.failure = None
        if size == 1:
            return
        kind = ProcessGroupNCCL if self._device.type == "cuda" else ProcessGroupGloo
        group = kind(timeout=self._timeout)
        self._meeting = True
        # A peer may be lost before the view has begun; whoever waits for it could not be interrupted.
        met = _in_thread(lambda: self._meet(group, store, name, index, size))
        self._wait_for_end(met.add_done_callback)
        self._meeting = False
        if not met.done():
            met.add_done_callback(lambda _: group.abort())
        elif (error := met.exception()) is not None:
            self.failure = error
        else:
            self._group = group

    def _meet(self, group: ProcessGroup, store: str, name: str, index: int, size: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # it is a thread's own, and NCCL meets on it
        group.configure(store, name, index, size)

    @property
    def is_late(self) -> bool:
        """Whether waiting for an operation ends before the operation, as on a GPU."""
        return self._device.type == "cuda"

    def came_through(self) -> bool:
        """Whether all that was summed in this view is right, as the device says once it has done it."""
        if self._group is not None and self.failure is None:
            self.failure = self._group.errored()  # waits for the device
        return self.failure is None

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with."""
        return self._group is None and self.failure is None

    def start(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum a tensor over the peers, in place; returns what waits for the end.

        All peers start the same tensors in the same order.
        """
        if self._group is None or self.failure is not None:
            return _nothing
        try:
            work = self._group.allreduce([tensor], AllreduceOptions())
        except Exception as error:  # noqa: BLE001
            self.failure = error
            return _nothing
        return lambda: self._wait(work)

    def sum(self, tensor: Tensor) -> bool:
        """Sum a tensor over the peers, in place; whether that went well."""
        self.start(tensor)()
        return self.failure is None

    def give_up(self, reason: str) -> None:
        """End the waiting of whoever waits in a collective of this view; may be called from any thread.

        Who is alone in a view gives up as well: others may have agreed on another one.
        """
        if self.failure is None:
            self.failure = dist.DistError(reason)
        with self._lock:
            self._given_up.set()
            for event in self._waiting:
                event.set()
        if self._device.type == "cuda" and self._group is not None:
            self._group.abort()  # kernels that wait for a peer come back

    def _wait(self, work: Work) -> None:
        try:
            if self._device.type != "cuda":
                self._wait_for_end(work.get_future().add_done_callback)
            if not self._given_up.is_set():
                work.wait()
        except Exception as error:  # noqa: BLE001
            self.failure = self.failure or error

    def _wait_for_end(self, call_at_end: Callable[[Callable[[Any], None]], object]) -> None:
        # gloo cannot be interrupted: who gives up walks away, and the operation runs into its timeout.
        ended = threading.Event()
        with self._lock:
            if self._given_up.is_set():
                return
            self._waiting.append(ended)
        call_at_end(lambda _: ended.set())
        ended.wait()
        with self._lock:
            self._waiting.remove(ended)

    def _leave_behind(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.failure is not None:
            # Its end waits for operations that hang; nobody waits for that.
            threading.Thread(target=group.abort, daemon=True).start()


def _in_thread(operation: Callable[[], None]) -> Future[None]:
    """Run in a thread that nobody has to wait for, not even the end of the process."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            operation()
        except Exception as error:  # noqa: BLE001  (told to whoever asks)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    return future


def _nothing() -> None:
    """Nobody to wait for."""
