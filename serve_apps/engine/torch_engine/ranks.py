"""The ranks of one replica: how they find, keep in step with, and leave one another."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from serve_apps.engine.protocol import EngineError
from serve_apps.engine.torch_engine.step import Kind, Step, decode, encode, frame_size
from serve_apps.engine.torch_engine.torch_options import TorchOptions


def device_of(rank: int, wanted: Literal["cpu", "cuda"] | None) -> torch.device:
    """Where this rank computes: of several GPUs that it sees on its own, of one that Ray shows it on that.

    Args:
        wanted: see `EngineConfig.device`.

    Raises:
        EngineError: a GPU is wanted, and there is none.
    """
    if wanted == "cpu" or (wanted is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError(f"the app takes GPUs, and rank {rank} sees none: torch {torch.__version__}")
    return torch.device("cuda", rank % torch.cuda.device_count())


class Ranks:
    """The process group of a tensor-parallel replica, as one of its ranks sees it.

    Raises:
        EngineError: from any method, when another rank died or did not answer in time.
    """

    def __init__(self, rank: int, world_size: int, max_batch: int, options: TorchOptions) -> None:
        self.rank = rank
        self.world_size = world_size
        self._frame = torch.zeros(frame_size(max_batch), dtype=torch.long)
        self._options = options
        self._store: dist.TCPStore | None = None
        self._patient: dist.ProcessGroup | None = None
        """The same ranks, for what may take longer than a step."""
        self._round = 0

    def join(self, master_addr: str, master_port: int, device: torch.device) -> None:
        """Meet the other ranks at the address of rank 0."""
        if ipaddress.ip_address(socket.gethostbyname(master_addr)).is_loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # transformers binds the rank to its device by this name.
            os.environ["LOCAL_RANK"] = str(device.index)
        try:
            self._store = self._open_store(master_addr, master_port)
            dist.init_process_group(
                backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=self._store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self._options.step_timeout_s),
            )
            patience = timedelta(seconds=self._options.start_timeout_s)
            self._patient = dist.new_group(backend="gloo", timeout=patience)
        except (OSError, RuntimeError) as error:
            raise EngineError(
                f"the {self.world_size} ranks did not meet at {master_addr}:{master_port}: {error}"
            ) from error

    def loaded(self, room: int) -> int:
        """Say how many blocks this rank has room for, and wait for the others; the least of all ranks.

        0 says that this rank could not load the model, and waits for nobody.
        """
        rooms = self._gather(room, wait=room > 0)
        if room and not all(rooms):
            raise EngineError(f"rank {rooms.index(0)} could not load the model; its own error says why")
        return min(rooms)

    def agree(self, ready: bool) -> bool:
        """Whether all ranks are ready; waits until each has said it."""
        return all(self._gather(int(ready), wait=True))

    def _gather(self, number: int, wait: bool) -> list[int]:
        """Say a number, and hear those of all ranks; only one's own without waiting."""
        if self._store is None:
            raise EngineError(f"rank {self.rank} has not joined the others")
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self.world_size)]
        failure: RuntimeError | None = None
        try:
            self._store.set(keys[self.rank], str(number))
            if not wait:
                return [number]  # its own exception says more
            try:
                # The store alone would not say that a rank has died; its connections do, at once.
                dist.barrier(self._patient)
            except RuntimeError as error:
                failure = error
            # A rank that does not wait has said why the others wait in vain.
            said = {
                each: int(self._store.get(key)) for each, key in enumerate(keys) if self._store.check([key])
            }
        except RuntimeError as error:
            raise EngineError(f"rank 0 of the replica died: {error}") from error
        if failure is not None and all(said.values()):
            lost = [str(each) for each in range(self.world_size) if each not in said]
            which = f"rank {', '.join(lost)}" if lost else "a rank"
            raise EngineError(f"{which} of the replica died or hangs: {failure}") from failure
        return [said.get(each, 1) for each in range(self.world_size)]

    def send(self, kind: Kind, step: Step | None = None, text: str = "") -> None:
        """Tell all ranks what comes next; only rank 0 does."""
        message = torch.tensor(encode(kind, step, text))
        head = message[: len(self._frame)]
        self._frame[: len(head)] = head
        self._broadcast(self._frame)
        if len(message) > len(self._frame):
            self._broadcast(message[len(self._frame) :])

    def receive(self) -> tuple[Kind, Step | None, str]:
        """Wait for what rank 0 says."""
        self._broadcast(self._frame)
        message = self._frame.tolist()
        if (missing := message[0] - len(message)) > 0:
            rest = torch.empty(missing, dtype=torch.long)
            self._broadcast(rest)
            message += rest.tolist()
        return decode(message)

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            dist.broadcast(tensor, src=0)
        except RuntimeError as error:
            raise EngineError(f"a rank of the replica died or hangs: {error}") from error

    def _open_store(self, master_addr: str, master_port: int) -> dist.TCPStore:
        listener = None
        if self.rank == 0:
            # Left to itself the store listens on every interface of the machine.
            family = socket.AF_INET6 if ":" in master_addr else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as bound:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((master_addr, master_port))
                bound.listen(self.world_size)
                listener = bound.detach()
        return dist.TCPStore(
            master_addr,
            master_port,
            self.world_size,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=self._options.start_timeout_s),
            master_listen_fd=listener,
        )
