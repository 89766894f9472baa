"""What travels in place of fp32 gradients under DistributedDataParallel: torch's communication hooks."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from cluster.config.sections.parallel import DDPConfig


def _bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch wants annotations as objects, or none
    """torch's own hook, which it refuses by its name for any backend but NCCL; gloo sums bf16 as well."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16_hook}

_REBUILD_STEPS = 2
"""DistributedDataParallel arranges its buckets anew in its first steps; PowerSGD must not begin before."""


class Compression:
    """The communication hook of one model, and what the hook remembers.

    PowerSGD (Vogels et al., NeurIPS 2019) sends each gradient matrix as two of low rank and adds what was
    lost to the next gradient: the loss is state of this rank, which a restart has to find again. After a
    restart two steps travel whole, until the buckets are arranged as they were.
    """

    def __init__(self, ddp: DistributedDataParallel, settings: DDPConfig) -> None:
        self.settings = settings
        self.powersgd: powerSGD_hook.PowerSGDState | None = None
        self._steps_before = 0
        if settings.compression == "powersgd":
            self.powersgd = powerSGD_hook.PowerSGDState(
                process_group=ddp.process_group,
                matrix_approximation_rank=settings.powersgd_rank,
                start_powerSGD_iter=settings.powersgd_warmup_steps,
            )
            ddp.register_comm_hook(self.powersgd, powerSGD_hook.powerSGD_hook)
        elif settings.compression != "none":
            ddp.register_comm_hook(None, HOOKS[settings.compression])

    def state(self) -> dict[str, Any]:
        """What this rank has to find again; empty for hooks that remember nothing."""
        if self.powersgd is None:
            return {}
        return {
            "layout": self._layout(),
            "steps": self._steps_before + self.powersgd.iter,
            "error": dict(self.powersgd.error_dict),
            "p": dict(self.powersgd.p_memory_dict),
            "q": dict(self.powersgd.q_memory_dict),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Take what `state` gave; what was lost under other buckets or another rank is forgotten."""
        if self.powersgd is None or not saved:
            return
        self._steps_before = saved["steps"]
        left = self.settings.powersgd_warmup_steps - self._steps_before
        self.powersgd.start_powerSGD_iter = max(_REBUILD_STEPS, left)
        if saved["layout"] == self._layout():
            self.powersgd.error_dict = saved["error"]
            self.powersgd.p_memory_dict = saved["p"]
            self.powersgd.q_memory_dict = saved["q"]

    def _layout(self) -> tuple[float, int]:
        return self.settings.bucket_cap_mb, self.settings.powersgd_rank
