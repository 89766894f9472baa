"""Every family of decoders that transformers has, as a model of a few thousand numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_MOST = 128
"""A number of a config that is larger, and that `_SMALL` does not know, becomes `_SIZE`."""
_SIZE = 32

_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "intermediate_size": 64,
    "head_dim": 8,
    "sliding_window": 6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "is_decoder": True,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4
    ),
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "n_shared_experts": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    "qk_head_dim": 16,
}
"""By name of a field, in any family."""

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_INDEXER = {
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
}
_INDEXED = {"layer_types": ["indexed_attention"] * 4}
_BY_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": _INDEXED,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MAMBA,
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What only one family needs."""

NOT_TINY = {
    "dots3_note": "its parts that see and hear have layers by number; its text is tried as dots3_note_text",
    "gemma3n": "its part that sees needs timm, which is not installed",
    "gemma4_assistant": "its own config as it comes is one that it refuses",
    "musicgen": "AutoModelForCausalLM cannot build it: its config lacks what its decoder reads",
    "musicgen_melody": "AutoModelForCausalLM cannot build it: its config lacks what its decoder reads",
}
"""Families that cannot be made small, or not at all, and why."""


def tiny(family: str) -> PreTrainedConfig:
    """A family's config with small numbers in place of its own."""
    return _shrunk(CONFIG_MAPPING[family], _BY_FAMILY.get(family, {}))


def _shrunk(kind: type[PreTrainedConfig], more: dict[str, Any]) -> PreTrainedConfig:
    said: dict[str, Any] = {}
    own = kind()
    for name, value in own.to_dict().items():
        if name in own.sub_configs:
            if getattr(own, name) is not None:
                said[name] = _shrunk(type(getattr(own, name)), more.get(name, {}))
        elif name in _SMALL:
            said[name] = _SMALL[name]
        elif type(value) is int and value > _MOST and not name.endswith(("_id", "_index")):
            said[name] = _SIZE
    if "kv_lora_rank" in said:
        said["num_key_value_heads"] = said["num_attention_heads"]
    return kind(**said | {name: value for name, value in more.items() if name not in own.sub_configs})


def save(config: PreTrainedConfig, tokenizer_of: Path, directory: Path) -> Path:
    """A model of random weights with nothing in them that starts as nothing."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.3)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(directory)
    return directory
