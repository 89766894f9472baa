"""The weights of a trained model, as they are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cluster.config.sections.parallel import Dtype
from cluster.config.sections.train import TrainJobConfig
from cluster.models.directory_here import directory_here

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_dtype(config: TrainJobConfig) -> torch.dtype:
    """Of a transformers model's weights: as the config says, else as they were where training began."""
    if config.export.precision is not None:
        return DTYPES[config.export.precision]
    if config.model.directory is None:
        return torch.float32
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(directory_here(config.model.directory), local_files_only=True).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of parameters that have several, each with the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            tied[name] = known
    return tied


def cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in another precision; what is no number with a fraction stays, and so do ties."""
    done: dict[int, Tensor] = {}
    for value in weights.values():
        if id(value) not in done:
            done[id(value)] = value.to(dtype) if value.is_floating_point() else value
    return {name: done[id(value)] for name, value in weights.items()}


def once(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor under the first of its names; and the other names, each with that one.

    So safetensors writes tied weights (`safetensors.torch.save_model`), and reads them (`load_model`).
    """
    first: dict[tuple[int, torch.Size], str] = {}
    kept: dict[str, Tensor] = {}
    dropped = {}
    for name, value in weights.items():
        known = first.setdefault((value.data_ptr(), value.shape), name) if value.numel() else name
        if known == name:
            kept[name] = value.contiguous()
        else:
            dropped[name] = known
    return kept, dropped
