"""The units of a model that sharding, compilation and activation checkpointing work by."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, outermost first come, none inside of another.

    transformers names the classes of a model's blocks itself (`_no_split_modules`); elsewhere they are the
    entries of its module lists. A model without either is one unit.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    _collect(model, names, found)
    return found


def _collect(module: nn.Module, names: set[str], found: list[nn.Module]) -> None:
    for child in module.children():
        if type(child).__name__ in names:
            found.append(child)
        elif not names and isinstance(child, nn.ModuleList):
            found.extend(child)
        else:
            _collect(child, names, found)
