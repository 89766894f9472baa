"""Copies of a training state on the CPU, made while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from train_jobs.optimization.gradients import local_part


class HostTransfer(Protocol):
    """How tensors come from a device into the memory of the host."""

    def mark(self) -> None:
        """What was begun on the device until now comes first; called by the thread that trains."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on the device."""

    def room(self, like: Tensor) -> Tensor:
        """A tensor of the same kind and shape in the memory of the host."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy, from plain tensor to plain tensor."""

    def finish(self) -> None:
        """Wait until all copies are there."""


class CudaTransfer:
    """Copies beside what the device computes: on a stream of its own, into memory that is pinned for it.

    Without a stream of their own copies would stand in line with the next forward and backward; without
    pinned memory each would keep the device waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._begun = torch.cuda.Event()

    def mark(self) -> None:
        self._begun.record(torch.cuda.current_stream(self._device))

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"

    def room(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def copy(self, source: Tensor, target: Tensor) -> None:
        # In this thread the device would be the first one, and a context of ours would lie there.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begun)
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        self._stream.synchronize()


class HostCopies:
    """Makes copies of states of one shape, one after another.

    Memory that was pinned stays for the next copy, since pinning takes longer than copying: so only the last
    copy is good. Of tensors that lie on the CPU each copy is another one.

    torch's own stagers cannot copy a rank's empty share of a tensor, and copy a sharded one twice.

    Args:
        transfer: for tensors of a device; None where all lie on the CPU.
    """

    def __init__(self, transfer: HostTransfer | None) -> None:
        self._transfer = transfer
        self._rooms: dict[tuple[object, ...], Tensor] = {}

    @classmethod
    def of(cls, device: torch.device) -> HostCopies:
        """For states on this device."""
        return cls(CudaTransfer(device) if device.type == "cuda" else None)

    def begin(self, state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Take this state as it is now; called by the thread that trains.

        Returns:
            makes the copy, in any thread: until it has returned the state must not change.
        """
        if self._transfer is not None:
            self._transfer.mark()

        def make() -> dict[str, Any]:
            copied: dict[str, Any] = self._copy_of(state, ())
            if self._transfer is not None:
                self._transfer.finish()
            return copied

        return make

    def _copy_of(self, value: object, path: tuple[object, ...]) -> Any:
        if isinstance(value, dict):
            return {name: self._copy_of(each, (*path, name)) for name, each in value.items()}
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        value = value.detach()
        if self._transfer is None or not self._transfer.takes(value):
            return value.to("cpu", copy=True)
        room = self._rooms.get(path)
        if room is None or (room.shape, room.dtype) != (value.shape, value.dtype):
            room = self._rooms[path] = self._transfer.room(value)
        self._transfer.copy(local_part(value), local_part(room))
        return room
