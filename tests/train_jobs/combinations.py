"""Every strategy and combination that is held to the single-process run."""

from __future__ import annotations

from typing import Any

COMBINATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "data_parallel": ({"strategy": "data_parallel"}, 1),
    "ddp ×2": ({"strategy": "ddp"}, 2),
    "ddp ×4": ({"strategy": "ddp"}, 4),
    "ddp ×2, static graph, small buckets": (
        {"strategy": "ddp", "ddp": {"static_graph": True, "bucket_cap_mb": 0.01}},
        2,
    ),
    "ddp ×2, full activation checkpointing": ({"strategy": "ddp", "activation_checkpointing": "full"}, 2),
    "fsdp ×2": ({"strategy": "fsdp"}, 2),
    "fsdp ×4": ({"strategy": "fsdp"}, 4),
    "fsdp ×2, reduced every micro-batch": (
        {"strategy": "fsdp", "fsdp": {"reduce_every_micro_batch": True}},
        2,
    ),
    "fsdp ×2, selective activation checkpointing": (
        {"strategy": "fsdp", "activation_checkpointing": "selective"},
        2,
    ),
    "hsdp 2×2": ({"strategy": "hsdp"}, 4),
    "zero1 ×2": ({"strategy": "zero1"}, 2),
    "zero1 ×4": ({"strategy": "zero1"}, 4),
    "zero2 ×2": ({"strategy": "zero2"}, 2),
    "zero2 ×4": ({"strategy": "zero2"}, 4),
    "zero3 ×2": ({"strategy": "zero3"}, 2),
    "ddp ×2 × tp 2": ({"strategy": "ddp", "tensor": 2}, 4),
    "fsdp ×2 × tp 2": ({"strategy": "fsdp", "tensor": 2}, 4),
    "zero2 ×2 × tp 2": ({"strategy": "zero2", "tensor": 2}, 4),
    "hsdp 2×2 × tp 2": ({"strategy": "hsdp", "tensor": 2, "shard": 2}, 8),
    "fsdp ×2 × tp 2, full activation checkpointing": (
        {"strategy": "fsdp", "tensor": 2, "activation_checkpointing": "full"},
        4,
    ),
    "ddp ×2 × cp 2": ({"strategy": "ddp", "context": 2}, 4),
    "zero1 ×2 × cp 2": ({"strategy": "zero1", "context": 2}, 4),
    "fsdp ×2 × cp 2": ({"strategy": "fsdp", "context": 2}, 4),
    "fsdp ×2 × cp 2, ulysses": ({"strategy": "fsdp", "context": 2, "context_method": "ulysses"}, 4),
    "hsdp 2×2 × cp 2": ({"strategy": "hsdp", "context": 2, "shard": 2}, 8),
    "ddp ×2 × tp 2 × cp 2": ({"strategy": "ddp", "tensor": 2, "context": 2}, 8),
    "fsdp ×2 × tp 2 × cp 2": ({"strategy": "fsdp", "tensor": 2, "context": 2}, 8),
}
"""By name: the `parallel` section, and the number of ranks."""

QUICK = (
    "data_parallel",
    "ddp ×2",
    "hsdp 2×2",
    "zero1 ×2",
    "zero2 ×2",
    "zero3 ×2",
)
"""Those that every run of the tests tries, for a few steps; the slow tests try all."""
