"""The memory that a model takes at the least, once it serves: its weights, and one request's KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from cluster.config.models.model_sizes import ModelDirectoryError, ModelSizes, read_model_config
from cluster.config.sections.model import ModelConfig
from cluster.files.safetensors import HeaderError, stored_tensors

NUMBER_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one number, by precision."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of a whole model; its ranks share them.

    They are lower bounds: what some engine repeats on every rank (embeddings, norms), activations and the
    libraries come on top. So whatever does not hold this much does not hold the model.
    """

    weight_bytes: int
    cache_bytes: int
    """Keys and values of one request of the longest context, or what the config gives them."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def rank_bytes(self, ranks: int) -> int:
        """What one of `ranks` equal ranks takes."""
        return -(-self.total_bytes // ranks)

    def describe(self, precision: str, ranks: int = 1) -> str:
        """What it consists of, in words, for one of `ranks` equal ranks."""
        weights, cache = show_gib(self.weight_bytes / ranks), show_gib(self.cache_bytes / ranks)
        return f"{weights} of weights in {precision} and {cache} of KV cache"


def weight_bytes(model: Path | ModelConfig, precision: str) -> int | None:
    """Bytes of a model's weights once they are loaded; None where nothing tells them.

    Args:
        model: a Hugging Face directory, or the sizes that a job makes its model from.
    """
    if isinstance(model, ModelConfig):
        if model.directory is not None:
            return weight_bytes(Path(model.directory), precision)
        if model.architecture == "resnet":
            return None  # no app serves it
        return count_parameters(model) * NUMBER_BYTES[precision]
    try:
        tensors, config = stored_tensors(model), read_model_config(model)
    except (HeaderError, ModelDirectoryError):
        return None  # whoever loads them says what is wrong with them
    if config.get("tie_word_embeddings") is True:
        # Some files hold the tied head once more; it is not loaded.
        tensors.pop("lm_head.weight", None)
    if not tensors:
        return None
    if "quantization_config" in config:
        return sum(tensor.num_bytes for tensor in tensors.values())
    number = NUMBER_BYTES[precision]
    return sum(tensor.size * number if tensor.is_float else tensor.num_bytes for tensor in tensors.values())


def cache_bytes(sizes: ModelSizes, context: int | None, precision: str) -> int:
    """Bytes of the keys and values of `context` tokens, on all ranks together; 0 where a size is unknown."""
    numbers = sizes.cache_numbers()
    length = context or sizes.context_length
    if numbers is None or length is None:
        return 0
    return numbers * NUMBER_BYTES[precision] * length


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the Llama that a job makes from sizes."""
    hidden, head = model.hidden_size, model.hidden_size // model.num_heads
    attention = 2 * hidden * hidden + 2 * hidden * model.kv_heads * head
    layer = attention + 3 * hidden * model.mlp_size + 2 * hidden
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return embeddings + model.num_layers * layer + hidden


def show_gib(num_bytes: float) -> str:
    """`13.5 GiB`; never rounded down to nothing."""
    gib = num_bytes / 2**30
    if gib >= 0.1 or gib == 0:
        return f"{gib:.1f} GiB"
    digits = 1 - math.floor(math.log10(gib))
    return f"{gib:.{digits}f} GiB"
