"""The training state of one rank, sent to its peers in groups that have yet to join."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroupGloo

State = dict[str, Any]


class Transfer:
    """Sends or receives a state in the background, by torchft's transport over a process group of its own.

    Args:
        timeout_s: longest that one message may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")

    def send(self, store: str, name: str, state: State, receivers: int, step: int) -> Future[None]:
        """Send tensors and other values as they are now; they must not change until the end.

        Args:
            store: HOST:PORT/PREFIX of a TCPStore; the prefix is this sender's.
            receivers: how many peers wait there.
        """
        return self._thread.submit(self._send, store, name, state, receivers, step)

    def receive(self, store: str, name: str, index: int, receivers: int, step: int) -> Future[State]:
        """Take what a peer sends, as the one with this index (from 0) of those who wait."""
        return self._thread.submit(self._receive, store, name, index, receivers, step)

    def _send(self, store: str, name: str, state: State, receivers: int, step: int) -> None:
        transport, group = self._connect(store, name, 0, receivers)
        transport.send_checkpoint(list(range(1, receivers + 1)), step, state, self._timeout)
        group.shutdown()

    def _receive(self, store: str, name: str, index: int, receivers: int, step: int) -> State:
        transport, group = self._connect(store, name, 1 + index, receivers)
        state: State = transport.recv_checkpoint(0, transport.metadata(), step, self._timeout)
        group.shutdown()
        return state

    def _connect(
        self, store: str, name: str, rank: int, receivers: int
    ) -> tuple[PGTransport[State], ProcessGroupGloo]:
        group = ProcessGroupGloo(timeout=self._timeout)
        group.configure(store, name, rank, 1 + receivers)
        return PGTransport(group, self._timeout, torch.device("cpu")), group
