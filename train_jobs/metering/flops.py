"""The arithmetic of a step, counted, and the peak that it is measured against."""

from __future__ import annotations

import copy
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cluster.config.sections.parallel import Dtype
from cluster.planning.hardware import find_accelerator
from train_jobs.data.source import Samples
from train_jobs.tasks.task import Task
from train_jobs.tasks.weights import DTYPES

_COUNTED = "shoal_counted"
_PEAK_SIZE = 1024
_PEAK_S = 0.15


def count_flops(model: nn.Module, task: Task, samples: Samples) -> float | None:
    """Floating-point operations of forward and backward of one sample; None where they cannot be counted.

    They are counted on a copy without data (device `meta`): nothing is computed. What activation
    checkpointing computes twice counts once, as model FLOPs do (Chowdhery et al., PaLM, 2022, appendix B).
    """
    try:
        batch = samples.batch([0], None)
        task = copy.copy(task)  # a tensor that it keeps from its first batch is not to be one without data
        empty = _without_data(model)
        if isinstance(empty, PreTrainedModel):
            # With an attention of its own name a model makes no mask, for which transformers looks at values.
            AttentionInterface.register(_COUNTED, sdpa_attention_forward)
            empty.set_attn_implementation(_COUNTED)
        with FlopCounterMode(display=False) as counter:
            task.loss(empty, {name: tensor.to("meta") for name, tensor in batch.items()}).loss.backward()
    except Exception as error:  # noqa: BLE001
        # A loss that looks at its values cannot be run without them; a batch of a single sample, or its loss,
        # may not be defined: whatever it is, a figure is no reason to end a job. What is really wrong the
        # steps say.
        print(
            f"operations cannot be counted, so that no MFU is known: {type(error).__name__}: {error}",
            flush=True,
        )
        return None
    return float(counter.get_total_flops()) or None


def _without_data(model: nn.Module) -> nn.Module:
    """A copy on device `meta`; the weights are never held twice."""
    instead: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    instead |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, instead)


def peak_flops(device: torch.device, precision: Dtype) -> tuple[float, str]:
    """The device's peak in FLOP/s, and where the figure is from: the catalogue's entry, or `measured`."""
    if device.type == "cuda":
        known = find_accelerator(torch.cuda.get_device_name(device))
        if known is not None:
            return known.flops[precision], known.name
    return _measure(device, DTYPES[precision]), "measured"


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of a large matrix product, the best of several."""
    one, other = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, device=device).to(dtype) for _ in range(2))
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < _PEAK_S or best == float("inf"):
        _wait_for(device)
        start = time.perf_counter()
        one @ other
        _wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * _PEAK_SIZE**3 / best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
