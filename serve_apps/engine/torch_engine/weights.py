"""Other weights for a model that is loaded: put in place of its own one tensor after another.

The memory that this takes beside the model is that of one tensor (of one layer, where several tensors of the
files become one of the model, as experts do), so that a full KV cache may be there too.
What can be known before anything is changed is looked at first: names, shapes, and what the model computes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from serve_apps.engine.protocol import EngineConfig, WeightsError
from serve_apps.engine.torch_engine import attention
from serve_apps.engine.torch_engine.model import PRECISIONS

_ENDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_NAMES = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
_CHANGES_NOTHING = frozenset((*_ENDS, *_NAMES))
"""Keys of a model's config that may differ: they are no part of what its layers compute."""
_LAYER = re.compile(r".*?\.\d+\.")
"""What the names of a layer's tensors begin with."""


def architecture(model_path: str) -> dict[str, Any]:
    """What a model's own config says of what its layers compute.

    Raises:
        OSError, ValueError: there is none.
    """
    return _without_names(AutoConfig.from_pretrained(model_path, local_files_only=True).to_dict())


def check_weights(model: Any, own: dict[str, Any], config: EngineConfig, model_path: str) -> Any:
    """See that the weights of a directory can take the place of a model's own; nothing of them is read yet.

    Args:
        own: the model's `architecture`.

    Returns:
        The directory's model without weights, whose configs say how its answers end.

    Raises:
        WeightsError: they cannot.
    """
    try:
        new = architecture(model_path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            device_map="meta",
            output_loading_info=True,
            dtype=PRECISIONS[config.precision],
            attn_implementation=attention.NAME,
            local_files_only=True,
        )
        _files(model_path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise WeightsError(f"the weights of {model_path} cannot be read: {error}") from error
    empty, found = loaded
    if own != new:
        name = next(key for key in sorted({*own, *new}) if own.get(key) != new.get(key))
        raise WeightsError(
            f"{model_path} is a model of another shape than the one that runs: its {name} is {new.get(name)},"
            f" and not {own.get(name)}; change to it with rollout: rolling"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise WeightsError(f"{model_path} is quantized; change to it with rollout: rolling")
    if lacking := sorted([*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]):
        raise WeightsError(f"the files of {model_path} lack weights of the model: {', '.join(lacking[:5])}")
    shapes, others = ({name: tuple(p.shape) for name, p in m.named_parameters()} for m in (model, empty))
    if shapes != others:
        name = next(iter(shapes.items() ^ others.items()))[0]
        raise WeightsError(f"{model_path} is a model of other sizes ({name} differs)")
    return empty


def put_weights(model: Any, model_path: str) -> None:
    """Load a directory's weights in place of a model's own, this rank's shards of them, in the model's types.

    Raises:
        WeightsError: something could not be read; the model has weights of both then.
    """
    conversions: list[Any] = get_model_conversion_mapping(model, None, None)
    arguments = LoadStateDictConfig(
        dtype=model.dtype,
        device_map={"": next(iter(model.parameters())).device},
        weight_mapping=conversions,
    )
    missing = set(model.state_dict())
    errors: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in _files(model_path)]
            # Slices: a tensor is read when its turn comes.
            tensors = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
            for names in _groups(tensors, conversions):
                # While it loads, transformers holds on to all that was there before: hence little at a time.
                group = {name: tensors[name] for name in names}
                found, _ = convert_and_load_state_dict_in_model(model, group, arguments)
                missing &= found.missing_keys
                errors |= found.conversion_errors
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise WeightsError(f"the weights of {model_path} cannot be read: {error}") from error
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    may_lack = {*model.all_tied_weights_keys, *(name for name, _ in model.named_buffers())}
    if wrong := sorted({*errors, *(missing - may_lack)}):
        why = "".join(f": {reason}" for reason in errors.values())[:500]
        raise WeightsError(f"{', '.join(wrong[:5])} of {model_path} cannot be loaded{why}")


def _groups(names: Iterable[str], conversions: Iterable[Any]) -> list[list[str]]:
    """Tensors that are loaded together: one, or a layer where several become one of the model's."""
    if not any(isinstance(conversion, WeightConverter) for conversion in conversions):
        return [[name] for name in names]
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    return list(groups.values())


def take_ends(model: Any, other: Any) -> None:
    """End answers as another model does."""
    model.generation_config = other.generation_config
    mine, theirs = (each.config.get_text_config(decoder=True) for each in (model, other))
    for name in _ENDS:
        setattr(mine, name, getattr(theirs, name, None))


def _files(model_path: str) -> list[Path]:
    """The files that transformers loads from a directory, in the order of their names."""
    directory = Path(model_path)
    whole = directory / "model.safetensors"
    if whole.exists():
        return [whole]
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return sorted({directory / name for name in index["weight_map"].values()})


def _without_names(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: _without_names(value) for key, value in said.items() if key not in _CHANGES_NOTHING}
    return said
