"""A DeepSpeed config beside a job of Shoal: what both of them say must agree. Pure, but for reading the file.

https://www.deepspeed.ai/docs/config-json/; `auto` stands for what the job says, as in Hugging Face's Trainer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.sections.train import TrainJobConfig

AUTO = "auto"


@dataclass(frozen=True)
class Shared:
    """One thing that both configs say.

    Attributes:
        path: where DeepSpeed's has it.
        key: the job's key.
        value: what the job says.
    """

    path: tuple[str, ...]
    key: str
    value: Any


def shared(job: TrainJobConfig, workers: int) -> list[Shared]:
    """All that both configs say, with this many workers."""
    optimizer = job.optimizer
    return [
        Shared(("train_batch_size",), "batch.global", job.batch.global_size),
        Shared(("train_micro_batch_size_per_gpu",), "batch.micro", job.batch.micro),
        Shared(
            ("gradient_accumulation_steps",),
            "batch.global / (batch.micro × workers)",
            job.batch.global_size // (job.batch.micro * workers),
        ),
        Shared(("gradient_clipping",), "optimizer.max_grad_norm", optimizer.max_grad_norm or 0.0),
        Shared(("fp16", "enabled"), "precision", job.precision == "fp16"),
        Shared(("bf16", "enabled"), "precision", job.precision == "bf16"),
        Shared(("optimizer", "params", "lr"), "optimizer.learning_rate", optimizer.learning_rate),
        Shared(("optimizer", "params", "weight_decay"), "optimizer.weight_decay", optimizer.weight_decay),
        Shared(
            ("optimizer", "params", "betas"),
            "optimizer.beta1 and beta2",
            [optimizer.beta1, optimizer.beta2],
        ),
        Shared(("optimizer", "params", "eps"), "optimizer.eps", optimizer.eps),
    ]


def read_deepspeed(path: str) -> dict[str, Any]:
    """The DeepSpeed config in a JSON file.

    Raises:
        ValueError: why it cannot be had, as the end of a sentence that begins with the path.
    """
    try:
        settings = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError("does not exist") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError("is no JSON") from error
    if not isinstance(settings, dict):
        raise ValueError("is no DeepSpeed config: it should hold one JSON object")
    return settings


def misplaced(settings: dict[str, Any], job: TrainJobConfig) -> Iterator[tuple[str, object]]:
    """Sections that are no mappings, with what is there instead."""
    sections = dict.fromkeys(
        each.path[:depth] for each in shared(job, 1) for depth in range(1, len(each.path))
    )
    for section in sections:
        given = _find(settings, section)
        if given is not None and not isinstance(given, dict):
            yield ".".join(section), given


def contradictions(
    settings: dict[str, Any], job: TrainJobConfig, workers: int
) -> Iterator[tuple[Shared, object]]:
    """What the two configs say differently, with DeepSpeed's value."""
    for each in shared(job, workers):
        given = _find(settings, each.path)
        if given is not None and given != AUTO and not _same(given, each.value):
            yield each, given


def complete_settings(settings: dict[str, Any], job: TrainJobConfig, workers: int) -> dict[str, Any]:
    """The DeepSpeed config as the engine takes it: what is `auto` or left out is the job's.

    An `auto` that the job says nothing about means DeepSpeed's default.
    """
    whole = copy.deepcopy(settings)
    for each in shared(job, workers):
        *sections, key = each.path
        if sections[:1] == ["optimizer"] and _find(whole, each.path) is None:
            continue  # an optimizer has the parameters that it has
        place = whole
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = each.value
    without_auto: dict[str, Any] = _without_auto(whole)
    return without_auto


def _find(settings: dict[str, Any], path: tuple[str, ...]) -> object:
    found: object = settings
    for step in path:
        if not isinstance(found, dict):
            return None
        found = found.get(step)
    return found


def _same(given: object, value: object) -> bool:
    if isinstance(given, bool) or isinstance(value, bool):
        return given is value
    if isinstance(value, list):
        return isinstance(given, list | tuple) and list(given) == value
    return given == value


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(each) for key, each in value.items() if each != AUTO}
    return value
