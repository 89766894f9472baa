"""DeepSpeed as the engine: it holds the model, adds gradients, clips, steps and scales as its config says.

https://deepspeed.readthedocs.io/; the ranks are all data-parallel, and what is sharded is its ZeRO stage.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from cluster.config.reading.deepspeed_settings import complete_settings
from cluster.config.sections.train import OptimizerConfig, TrainJobConfig
from cluster.errors import RequestError
from train_jobs.errors import CheckpointError
from train_jobs.optimization.gradients import global_norm
from train_jobs.optimization.loss_scale import LossScale
from train_jobs.optimization.optimizers import build_optimizer, parameter_groups
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import ParallelModel

_TAG = "state"


class EngineLossScale(LossScale):
    """The engine's own: it scales in backward, unscales, and skips steps by itself."""

    def __init__(self, optimizer: Any, enabled: bool) -> None:
        super().__init__(enabled)
        self._optimizer = optimizer
        self.value = 1.0  # for the loop, which has nothing to scale

    @property
    def shown(self) -> float:
        known = getattr(self._optimizer, "loss_scale_config", self._optimizer)
        return float(known.cur_scale)

    @property
    def exhausted(self) -> bool:
        """The engine stops by itself when no scale helps."""
        return False

    def update(self, finite: bool) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


class DeepSpeedModel(ParallelModel):
    """Under a DeepSpeed engine.

    A checkpoint has the whole model under its own names, in fp32, for whoever reads it; training goes on from
    the engine's own files, which fit the engine and the number of ranks that wrote them.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, config: TrainJobConfig) -> None:
        os.environ.setdefault("DS_ACCELERATOR", mesh.device.type)
        os.environ.setdefault("LOCAL_RANK", str(mesh.device.index or 0))
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        settings = complete_settings(config.parallel.deepspeed, config, mesh.shape.world_size)
        optimizer = None
        if "optimizer" not in settings:
            model.to(mesh.device)
            optimizer = build_optimizer(model, config.optimizer)
            # What DeepSpeed knows of an optimizer of torch's is that it has not been tried with ZeRO.
            settings = {
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                **settings,
            }
        deepspeed.init_distributed(dist_init_required=False)
        try:
            with mesh.adopting():
                engine, *_ = deepspeed.initialize(
                    model=model,
                    optimizer=optimizer,
                    model_parameters=parameter_groups(model, config.optimizer) if optimizer is None else None,
                    config=settings,
                )
        except (ValueError, AssertionError, TypeError, KeyError) as error:
            raise RequestError(f"parallel.deepspeed: DeepSpeed does not take it: {_reason(error)}") from error
        super().__init__(engine, mesh)
        self.engine = engine
        self.stepped = model
        self._plain = (
            settings.get("zero_optimization", {}).get("stage", 0) == 0 and config.precision == "fp32"
        )

    @contextmanager
    def synchronize(self, last: bool) -> Iterator[None]:
        # Evaluation passes here too; the next training micro-batch says anew what it is.
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # the engine casts

    def optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.engine.optimizer
        return optimizer

    def loss_scale(self, config: TrainJobConfig) -> LossScale:
        return EngineLossScale(self.engine.optimizer, config.precision == "fp16")

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        factor: float,
        max_norm: float | None,
        before_change: Callable[[], None],
    ) -> float:
        """As the engine does it, whose config has this `max_norm`; only an fp16 scale leaves a step out."""
        if factor != 1.0:
            raise RequestError(
                "parallel.engine deepspeed averages over samples that all count alike; in this step the task "
                f"counted {1 / factor:.4f} of what a full batch counts"
            )
        # Without ZeRO or a scale the engine computes no norm; the gradients are whole then, and reduced.
        norm = global_norm(self.engine.module.parameters()) if self._plain else None
        before_change()
        self.engine.step()
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        if norm is None:
            raise RequestError("parallel.deepspeed: zero_optimization.compute_grad_norm should be true")
        return float(norm) if self.engine.was_step_applied() else math.inf

    def drop_gradients(self) -> None:
        self.engine.zero_grad()

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Each rank keeps its share of the whole tensors; the optimizer's state is in the engine's files."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        whole = enumerate(self._whole_tensors())
        return {name: tensor.cpu() for index, (name, tensor) in whole if index % ranks == rank}, {}

    def state_to_load(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def load_state(
        self, optimizer: torch.optim.Optimizer, model: dict[str, Any], state: dict[str, Any]
    ) -> None:
        pass

    def whole_model(self) -> dict[str, Tensor]:
        first = dist.get_rank() == 0
        return {name: tensor.cpu() for name, tensor in self._whole_tensors() if first}

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors one by one, parameters in fp32; all ranks take part in gathering each."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, value in self.engine.module.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                whole = safe_get_full_fp32_param(value)
                yield name, (value if whole is None else whole).detach().float()
            elif isinstance(value, Tensor):
                yield name, value

    def own_state(self) -> dict[str, Any]:
        """The files that this rank's engine writes."""
        with tempfile.TemporaryDirectory(prefix="shoal-deepspeed-") as directory:
            (Path(directory) / _TAG).mkdir()
            self.engine.save_checkpoint(directory, tag=_TAG, save_latest=False)
            files = [path for path in Path(directory).rglob("*") if path.is_file()]
            contents = {str(path.relative_to(directory)): path.read_bytes() for path in files}
        return {"ranks": dist.get_world_size(), "files": contents}

    def load_own_state(self, state: dict[str, Any]) -> None:
        saved, now = state.get("ranks"), dist.get_world_size()
        if saved != now:
            raise CheckpointError(
                f"DeepSpeed's state fits the {saved} ranks that saved it, not {now}; an export of it fits any"
                if saved is not None
                else "it has no state of DeepSpeed's for this rank"
            )
        # What the ranks have in common was written by the first of them.
        shared = [state["files"] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        with tempfile.TemporaryDirectory(prefix="shoal-deepspeed-") as directory:
            for name, content in {**(shared[0] or {}), **state["files"]}.items():
                path = Path(directory) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            loaded, _ = self.engine.load_checkpoint(directory, tag=_TAG)
        if loaded is None:
            raise CheckpointError("DeepSpeed could not load its state")


def _reason(error: Exception) -> str:
    """What an engine refused, in a line."""
    if isinstance(error, ValidationError):
        each = ("{}: {}".format(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors())
        return "; ".join(each)
    return (str(error) or type(error).__name__).splitlines()[0]


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, config: TrainJobConfig
) -> ParallelModel:
    return DeepSpeedModel(model, mesh, config)
