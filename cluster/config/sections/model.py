"""The `model` part of a training job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from cluster.config.sections.section import Section


class ModelConfig(Section):
    """The model: from sizes, or from a directory in the Hugging Face format."""

    directory: str | None = None
    """Continue from this Hugging Face directory (relative to the config file, or a URI); the sizes are then
    its own."""
    architecture: Literal["llama", "resnet"] | None = None
    """Architecture of a model that starts from sizes. Default: llama for causal_lm, resnet for
    image_classification."""
    hidden_size: int = Field(default=256, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP. Default: 8/3 of hidden_size, rounded up to a multiple of 64."""
    num_layers: int = Field(default=4, ge=1)
    num_heads: int = Field(default=8, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads (grouped-query attention). Default: num_heads."""
    vocab_size: int = Field(default=4096, ge=257)
    """Tokens of the byte-level BPE that is trained when the data names no tokenizer."""
    max_position_embeddings: int = Field(default=2048, ge=1)
    """Longest sequence the model is made for, in tokens."""
    tie_word_embeddings: bool = False
    layer_type: Literal["basic", "bottleneck"] = "basic"
    """Layers of a resnet: basic as in ResNet-18 and -34, bottleneck as in ResNet-50 and larger."""
    embedding_size: int = Field(default=16, ge=1)
    """Channels after the first convolution of a resnet."""
    hidden_sizes: tuple[PositiveInt, ...] = Field(default=(16, 32, 64), min_length=1, strict=False)
    """Channels of each stage of a resnet."""
    depths: tuple[PositiveInt, ...] = Field(default=(2, 2, 2), min_length=1, strict=False)
    """Layers in each stage of a resnet."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_size(self) -> int:
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64


TEXT_SIZES = (
    *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size"),
    *("max_position_embeddings", "tie_word_embeddings"),
)
"""Keys of `model` that a causal language model has."""
IMAGE_SIZES = ("layer_type", "embedding_size", "hidden_sizes", "depths")
"""Keys of `model` that a resnet has."""
