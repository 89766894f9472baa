"""The training state as torch.distributed.checkpoint saves and restores it."""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler


class TrainingState:
    """Model, optimizer, schedule, data position and random states of one rank's share of a job.

    The data position is the number of steps done: which samples come next follows from it alone.
    Parameters are saved under the model's own names whatever the strategy; replicated ones once.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.step = 0
        # Collectives of a save that runs in the background must not mix with those of the step loop.
        self.group = dist.new_group(backend="gloo")

    def save(self, directory: Path) -> None:
        """Write this rank's part into `directory`; returns when all ranks have written theirs."""
        dcp.save(self._collect(), storage_writer=self._writer(directory), process_group=self.group)

    def save_in_background(self, directory: Path) -> Future[Any]:
        """Copy the state and write it while training goes on; rank 0's future ends when all ranks wrote."""
        saved = dcp.async_save(
            self._collect(), storage_writer=self._writer(directory), process_group=self.group
        )
        assert isinstance(saved, Future)
        return saved

    def load(self, directory: Path) -> None:
        """Restore from a complete checkpoint; parameters and optimizer state are filled in place."""
        reader = dcp.FileSystemReader(directory)
        wanted = self._collect()
        present = reader.read_metadata().state_dict_metadata
        # Another number of workers may have saved: a rank that was not among them keeps its own.
        mine = self._random_key()
        has_random = any(key == mine or key.startswith(f"{mine}.") for key in present)
        if not has_random:
            del wanted[mine]
        dcp.load(wanted, storage_reader=reader, process_group=self.group)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=wanted["model"],
            optim_state_dict=wanted["optimizer"],
        )
        self.schedule.load_state_dict(wanted["schedule"])
        self.step = wanted["progress"]["step"]
        if has_random:
            self._restore_random(wanted[mine])

    def full_model(self) -> dict[str, Tensor]:
        """The whole model's state dict on the CPU of rank 0; empty on the others. Called by all ranks."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _collect(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "progress": {"step": self.step},
            self._random_key(): self._random_state(),
        }

    def _random_key(self) -> str:
        return f"random_rank{dist.get_rank()}"

    @staticmethod
    def _random_state() -> dict[str, Any]:
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    @staticmethod
    def _restore_random(state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    @staticmethod
    def _writer(directory: Path) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(directory, sync_files=True)
