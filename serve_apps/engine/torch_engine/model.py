"""The model of a Hugging Face directory, whole or this rank's shard of it, ready for inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from serve_apps.engine.protocol import EngineConfig, EngineError
from serve_apps.engine.torch_engine import attention

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

_HEADS = ("num_attention_heads", "num_key_value_heads")
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must know of a model before and beside its weights."""

    context_length: int
    vocab_size: int
    num_layers: int
    heads: tuple[frozenset[int], ...]
    """Numbers of query heads and of key and value heads, and their size, of all layers."""
    layer_types: frozenset[str]
    """Kinds of attention in the model, in transformers' words."""


def read_facts(config: EngineConfig, model_path: str) -> ModelFacts:
    """Read a model's own config, and check that this engine can run it as asked.

    Raises:
        EngineError: it cannot; the message says why.
    """
    try:
        whole = AutoConfig.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_path} is no model that transformers reads: {error}") from error
    kind = _check_family(whole, model_path)
    text = whole.get_text_config(decoder=True)
    layer_types = _layer_types(text)
    if unknown := layer_types - _KNOWN_LAYERS:
        raise EngineError(
            f"the model {model_path} has layers of type {', '.join(sorted(unknown))}; "
            f"the torch engine runs {', '.join(sorted(_KNOWN_LAYERS))}"
        )
    if not getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(whole)], "_supports_attention_backend", False):
        raise EngineError(f"{kind}, which has attention of its own that the torch engine cannot run")
    if getattr(text, "num_kv_shared_layers", 0):
        raise EngineError(
            f"layers of the model {model_path} share keys and values, which the torch engine cannot run"
        )
    if config.tensor > 1:
        _check_heads(text, config.tensor, model_path)
    return ModelFacts(
        context_length=_context_length(text, config.context_length, model_path),
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        heads=tuple(_of_layers(text, name) for name in (*_HEADS, "head_dim")),
        layer_types=layer_types,
    )


def load_model(config: EngineConfig, model_path: str, device: torch.device) -> Any:
    """Load a model onto `device`; with tensor > 1, this rank's shard by the model's own plan.

    The process group must exist where tensor > 1.

    Raises:
        EngineError: its files are not whole, or this engine cannot run it.
    """
    # A replica's log is no terminal.
    logging.disable_progress_bar()
    arguments: dict[str, Any] = {
        "dtype": PRECISIONS[config.precision],
        "attn_implementation": attention.NAME,
        "local_files_only": True,
    }
    if config.tensor > 1:
        arguments["distributed_config"] = DistributedConfig(tp_size=config.tensor, tp_plan="auto")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model_path, output_loading_info=True, **arguments)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(f"the weights of {model_path} cannot be read: {error}") from error
    model, found = loaded
    # What is missing would be made up at random.
    if lacking := sorted([*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]):
        raise EngineError(f"the files of {model_path} lack weights of the model: {', '.join(lacking[:5])}")
    if config.tensor == 1:
        model = model.to(device)
    elif not model.supports_tp_plan:
        raise EngineError(f"the model {model_path} has no tensor-parallel plan; serve it with tensor: 1")
    return model.eval()


def read_tokenizer(model_path: str) -> Any:
    """The tokenizer in a model's directory.

    Raises:
        EngineError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_path} has no tokenizer: {error}") from error


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: those of the model's generation config (or else its config), and the
    tokenizer's, which ends turns in chat models whose config still names what ended a document."""
    own = tokenizer.eos_token_id
    return _eos_of(model) | frozenset([own] if isinstance(own, int) else own or ())


def _eos_of(model: Any) -> frozenset[int]:
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    if named is None:
        named = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)


def _check_family(config: PreTrainedConfig, model_path: str) -> str:
    """Refuse what is no model of the kind that this engine runs, before its weights are read; what it is."""
    kind = f"{model_path} is of the family {config.model_type}"
    if config.is_encoder_decoder:
        raise EngineError(f"{kind}, encoders with decoders; the torch engine runs decoders alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineError(f"{kind}, which generates no text")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise EngineError(f"{kind}, whose models read in both directions; the torch engine runs decoders")
    return kind


def _most_positions(text: PreTrainedConfig) -> int | None:
    """The longest context in which a token's place means the same whatever else is in the batch.

    Beyond its first length a model of the kind longrope takes other factors for all of a batch.
    """
    most: int | None = getattr(text, "max_position_embeddings", None)
    scaling = getattr(text, "rope_parameters", None) or {}
    if scaling.get("rope_type") != "longrope":
        return most
    first = scaling.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", most
    )
    return first if most is None else min(most, first or most)


def _context_length(text: PreTrainedConfig, wanted: int | None, model_path: str) -> int:
    most = _most_positions(text)
    if wanted is None:
        if most is None:
            raise EngineError(f"the model {model_path} does not say its context; set context_length")
        return int(most)
    if most is not None and wanted > most:
        whole = getattr(text, "max_position_embeddings", most)
        more = f" in the torch engine (with engine: vllm {whole})" if whole > most else ""
        raise EngineError(f"context_length is {wanted}, but the model {model_path} takes {most}{more}")
    return wanted


def _layer_types(text: PreTrainedConfig) -> frozenset[str]:
    types = getattr(text, "layer_types", None)
    if types is not None:
        return frozenset(types)
    window = getattr(text, "sliding_window", None)
    return frozenset({"full_attention" if window is None else "sliding_attention"})


def _check_heads(text: PreTrainedConfig, tensor: int, model_path: str) -> None:
    for name in _HEADS:
        for heads in _of_layers(text, name):
            if heads % tensor:
                raise EngineError(
                    f"tensor is {tensor}, which does not divide the {heads} {name} of {model_path}"
                )


def _of_layers(text: PreTrainedConfig, name: str) -> frozenset[int]:
    """What a config says under a name, of all its layers: some give each layer a config of its own."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    found = (getattr(layer, name, None) for layer in layers)
    return frozenset(value for value in found if value is not None)
