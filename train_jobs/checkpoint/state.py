"""The training state as torch.distributed.checkpoint saves and restores it."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from train_jobs.checkpoint.files import CheckpointReader, CheckpointWriter
from train_jobs.checkpoint.host_copies import HostCopies
from train_jobs.data.loader import BatchLoader, StreamLoader
from train_jobs.errors import CheckpointError
from train_jobs.optimization.gradients import local_part
from train_jobs.optimization.loss_guard import LossGuard
from train_jobs.optimization.loss_scale import LossScale
from train_jobs.parallel.model import ParallelModel
from train_jobs.parallel.randomness import seed_generators

_GUARD = "guard"


@dataclass(frozen=True)
class BackgroundSave:
    """A save in flight.

    Attributes:
        copied: ends when the state may change again.
        written: ends when all ranks have written.
    """

    copied: Future[dict[str, Any]]
    written: Future[None]


class TrainingState:
    """Model, optimizer, loss scale and guard, data position and random states of one rank's share of a job.

    Which samples come next follows from the number of steps done, from what the guard has passed over and
    from how large global batches were (a stream knows its own place); the learning rate follows from the
    number of steps alone. The
    optimizer's settings are the config's, which a resumed job may have changed; only what it has learned is
    saved. Parameters and what the optimizer keeps of each are saved under the model's own names whatever the
    strategy, so that any other finds them.

    Args:
        key: what this rank's random numbers follow from; without one its generators stay as they are.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale,
        guard: LossGuard,
        loader: BatchLoader | StreamLoader,
        key: Sequence[int] = (),
    ) -> None:
        self.parallel = parallel
        self.optimizer = optimizer
        self.loss_scale = loss_scale
        self.guard = guard
        self.loader = loader
        self.key = key
        self.step = 0
        self.other_samples = False
        """The state was saved by a job of other samples, or of another order of them: they begin anew."""

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """Collectives of a save that runs in the background must not mix with those of the step loop."""
        return self.parallel.mesh.background()

    def save(self, writer: CheckpointWriter) -> None:
        """Write this rank's part; returns when all ranks have written theirs and the checkpoint counts."""
        dcp.save(self._collect(), storage_writer=writer, process_group=self.group)

    def save_in_background(self, writer: CheckpointWriter) -> BackgroundSave:
        """Copy the state and write the copy, both while training goes on.

        Parameters and optimizer state must not change before the copy is made: the next forward and backward
        may run, the optimizer waits. The one before must have ended.
        """
        state = self._collect()
        # A forward pass changes these; they are small.
        buffers = {name for name, _ in self.parallel.stepped.named_buffers()}
        model = state["model"]
        state["model"] = {name: model[name].clone() if name in buffers else model[name] for name in model}
        copying = self._copier.submit(self._copies.begin(state))
        group = self.group  # made here, where all ranks are
        return BackgroundSave(copying, self._background.submit(self._write_copy, copying, writer, group))

    @staticmethod
    def _write_copy(
        copying: Future[dict[str, Any]], writer: CheckpointWriter, group: dist.ProcessGroup
    ) -> None:
        problem: str | None = None
        state: dict[str, Any] = {}
        try:
            state = copying.result()
        except Exception as error:  # noqa: BLE001  (the other ranks have to hear of it, whatever it is)
            problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        # A rank that cannot copy would leave the others waiting for it in the collectives of the save.
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=group)
        for each in problems:
            if each is not None:
                raise CheckpointError(f"the state could not be copied: {each}")
        dcp.save(state, storage_writer=writer, process_group=group)

    @cached_property
    def _copies(self) -> HostCopies:
        return HostCopies.of(self.parallel.mesh.device)

    @cached_property
    def _copier(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")

    @cached_property
    def _background(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def load(self, reader: CheckpointReader) -> list[str]:
        """Restore from a complete checkpoint; parameters and optimizer state are filled in place.

        Returns:
            the parameters of which the optimizer had kept nothing: no step had given them a gradient.
        """
        model, fresh = self.parallel.state_to_load(self.optimizer)
        saved = reader.read_metadata().state_dict_metadata
        begun = _begun_anew(fresh, saved)
        optimizer = {name: value for name, value in fresh.items() if name not in begun}
        wanted: dict[str, Any] = {"model": model, "optimizer": optimizer, "progress": self._progress()}
        wanted = {key: value for key, value in wanted.items() if value}
        # Another number of workers may have saved: a rank that was not among them keeps its own.
        if _own_key() in saved:
            wanted[_own_key()] = b""
        if f"progress.{_GUARD}" not in saved:
            del wanted["progress"][_GUARD]  # an older version saved it
        dcp.load(wanted, storage_reader=reader, process_group=self.group)
        self.parallel.load_state(
            self.optimizer, wanted.get("model", {}), {**fresh, **wanted.get("optimizer", {})}
        )
        self._go_on(wanted["progress"])
        if _own_key() in wanted:
            self._restore_own(wanted[_own_key()])
        else:
            self.parallel.load_own_state({})
            self.draw_anew()
        return sorted({_parameter_of(name).removeprefix("state.") for name in begun})

    def handed_on(self) -> dict[str, Any]:
        """All of it, for this rank's peer in another group; the tensors are the real ones.

        They must not change meanwhile; of buffers, which a forward pass changes, it has copies.
        """
        model, optimizer = self.parallel.state(self.optimizer)
        buffers = {name for name, _ in self.parallel.stepped.named_buffers()}
        tensors = {
            **{f"model.{name}": local_part(value) for name, value in model.items()},
            **{f"optimizer.{name}": local_part(value) for name, value in optimizer.items()},
        }
        for name in buffers & model.keys():
            tensors[f"model.{name}"] = tensors[f"model.{name}"].clone()
        return {"tensors": tensors, "progress": self._progress(), "own": self._own()}

    @torch.no_grad()
    def take(self, handed: dict[str, Any]) -> None:
        """Go on from what a peer has handed on."""
        model, optimizer = self.parallel.state_to_load(self.optimizer)
        begun = _begun_anew(optimizer, handed["tensors"])
        for prefix, values in (("model.", model), ("optimizer.", optimizer)):
            for name in values.keys() - begun:
                value = handed["tensors"][prefix + name]
                if isinstance(values[name], Tensor):
                    local_part(values[name]).copy_(value)
                else:
                    values[name] = value
        self.parallel.load_state(self.optimizer, model, optimizer)
        self._go_on(handed["progress"])
        self._restore_own(handed["own"])
        self.draw_anew()  # not what the peer draws: it has other samples

    def draw_anew(self) -> None:
        """Draw what this rank draws at random from a beginning that no other rank and no other step has."""
        if self.key:
            seed_generators([*self.key, self.step])

    def randomness(self) -> dict[str, Any]:
        """The states of the random generators that a step draws from."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def restore_randomness(self, state: dict[str, Any]) -> None:
        """Take what `randomness` gave; a generator that is not named goes on as it is."""
        torch.set_rng_state(state["torch"].cpu())
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())

    def full_model(self) -> dict[str, Tensor]:
        """The whole model's state dict on the CPU of rank 0; empty on the others. Called by all ranks."""
        self.parallel.agree_on_statistics()
        return self.parallel.whole_model()

    def _collect(self) -> dict[str, Any]:
        self.parallel.agree_on_statistics()
        model, optimizer = self.parallel.state(self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "progress": self._progress(),
            _own_key(): self._own(),
        }

    def _progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss_scale": self.loss_scale.state(),
            "data": json.dumps(self.loader.position()),
            _GUARD: json.dumps(self.guard.state()),
        }

    def _go_on(self, progress: dict[str, Any]) -> None:
        self.step = progress["step"]
        self.loss_scale.load(progress["loss_scale"])
        self.guard.load(json.loads(progress.get(_GUARD, "null")))
        self.other_samples = self.loader.seek(json.loads(progress["data"]), self.guard.batches(self.step))

    def _own(self) -> bytes:
        """What belongs to this rank alone."""
        state = {**self.randomness(), "strategy": self.parallel.own_state()}
        stream = io.BytesIO()
        torch.save(state, stream)
        return stream.getvalue()

    def _restore_own(self, saved: bytes) -> None:
        # Its own checkpoint: whoever can write that can change the code as well.
        state = torch.load(io.BytesIO(saved), map_location=self.parallel.mesh.device, weights_only=False)
        self.restore_randomness(state)
        self.parallel.load_own_state(state["strategy"])


def _begun_anew(names: Iterable[str], saved: Iterable[str]) -> set[str]:
    """Which of an optimizer's names belong to a parameter of which nothing was saved.

    Args:
        saved: names of all that was, the optimizer's behind `optimizer.`.
    """
    known = {_parameter_of(name) for name in saved}
    return {name for name in names if _parameter_of(f"optimizer.{name}") not in known}


def _parameter_of(name: str) -> str:
    """What a name of flattened optimizer state is the last part of: `state.`, and the parameter's name."""
    return name.rpartition(".")[0]


def _own_key() -> str:
    return f"rank{dist.get_rank()}"
