"""How a job is spread over its workers: what does not go together is said, at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes, position

NODES = "cluster: {nodes: [{name: a, cpus: 4, gpus: 4}, {name: b, cpus: 4, gpus: 4}]}\n"


@pytest.mark.parametrize(
    ("job", "marker", "path", "words"),
    [
        (
            "parallel: {strategy: zero1, tensor: 2}, workers: {min: 2}",
            "2}, w",
            "parallel.tensor",
            "should be 1 under parallel.strategy (zero1), was 2; ddp, fsdp, hsdp, zero2, zero3 know",
        ),
        (
            "parallel: {strategy: data_parallel, context: 2}, workers: {min: 2}",
            "2}, w",
            "parallel.context",
            "should be 1 under parallel.strategy (data_parallel), was 2",
        ),
        (
            "parallel: {strategy: data_parallel}, workers: {min: 2}",
            "2}",
            "workers.min",
            "should be 1 under parallel.strategy (data_parallel), which is one process",
        ),
        (
            "parallel: {strategy: data_parallel}, workers: {max: 2}",
            "2}",
            "workers.max",
            "should be 1 under parallel.strategy (data_parallel), which is one process",
        ),
        ("parallel: {shard: 1}", "1}", "parallel.shard", "hsdp only, not under ddp"),
        (
            "parallel: {offload: true}",
            "true",
            "parallel.offload",
            "should be false under parallel.strategy (ddp); fsdp, hsdp, zero2, zero3 know",
        ),
        (
            "parallel: {strategy: fsdp, ddp: {compression: fp16}}",
            "fp16",
            "parallel.ddp.compression",
            "has no effect under parallel.strategy (fsdp), was fp16",
        ),
        (
            "parallel: {tensor: 2, ddp: {static_graph: true}}, workers: {min: 2}",
            "true",
            "parallel.ddp.static_graph",
            "has no effect beside parallel.tensor (2), was true",
        ),
        (
            "parallel: {fsdp: {reduce_dtype: bf16}}",
            "bf16",
            "parallel.fsdp.reduce_dtype",
            "has no effect under parallel.strategy (ddp), was bf16",
        ),
        (
            "parallel: {tensor: 2, compile: true}, workers: {min: 2}",
            "true",
            "parallel.compile",
            "should be false beside parallel.tensor (2)",
        ),
        (
            "parallel: {ddp: {sync_batch_norm: true}}",
            "true",
            "parallel.ddp.sync_batch_norm",
            "needs workers with GPUs",
        ),
        (
            "parallel: {context: 2, context_method: ring}, workers: {min: 2}",
            "ring",
            "parallel.context_method",
            "needs workers with GPUs",
        ),
        (
            "parallel: {tensor: 3}, workers: {min: 3}",
            "3}, w",
            "parallel.tensor",
            "should divide the model's attention heads (8), was 3",
        ),
        (
            "model: {num_kv_heads: 2}, parallel: {tensor: 4}, workers: {min: 4}",
            "4}, w",
            "parallel.tensor",
            "should divide the model's key and value heads (2), was 4",
        ),
        (
            "model: {num_kv_heads: 2}, parallel: {tensor: 2, context: 2, context_method: ulysses}, "
            "workers: {min: 4}",
            "2, context_method",
            "parallel.context",
            "should divide the key and value heads of a rank (1) for ulysses, was 2",
        ),
        (
            "data: {sequence_length: 255}, parallel: {context: 2}, workers: {min: 2}",
            "255",
            "data.sequence_length",
            "should be a multiple of parallel.context (2), was 255",
        ),
        (
            "parallel: {strategy: fsdp, tensor: 2, context: 2}, workers: {min: 4, max: 6}",
            "6}",
            "workers.max",
            "should be a multiple of parallel.tensor × parallel.context (4), was 6",
        ),
        (
            "parallel: {strategy: hsdp, shard: 3}, workers: {min: 4, cpus: 0}",
            "4, cpus: 0",
            "workers.min",
            "should be a multiple of parallel.tensor × parallel.context × parallel.shard (3), was 4",
        ),
        (
            "parallel: {strategy: fsdp, tensor: 2}, workers: {min: 2, max: 6}",
            "j:",
            "batch.global",
            "micro (8) × workers / 2 (parallel.tensor × parallel.context) at every number of workers (2 to 6)"
            "; 32 is none at 6",
        ),
        (
            "workers: {min: 1, max: 5}",
            "j:",
            "batch.global",
            "should be at least 40, a micro-batch for each rank of 5 groups, was 32",
        ),
        (
            "parallel: {strategy: fsdp}, workers: {min: 3, max: 6, group: 3}",
            "j:",
            "batch.global",
            "should be a multiple of batch.micro (8) × data-parallel ranks of a group (3), was 32",
        ),
        (
            "parallel: {strategy: fsdp}, workers: {min: 3, max: 4, group: 2}",
            "3, max",
            "workers.min",
            "should be a multiple of workers.group (2), was 3",
        ),
        (
            "parallel: {strategy: fsdp, tensor: 2}, workers: {min: 4, max: 4, group: 3}",
            "3}",
            "workers.group",
            "should be a multiple of 2, the workers of one copy of the model, was 3",
        ),
        (
            "parallel: {strategy: zero1}, workers: {group: 1, min: 1, max: 2}",
            "1, min",
            "workers.group",
            "has no meaning under parallel.strategy zero1; ddp, fsdp, hsdp, zero2, zero3 know replica groups",
        ),
        (
            "parallel: {ddp: {compression: powersgd}}, workers: {min: 1, max: 2}",
            "powersgd",
            "parallel.ddp.compression",
            "should be none, fp16 or bf16 where replica groups come and go; was powersgd",
        ),
        (
            "parallel: {tensor: 4}, workers: {min: 4, cpus: 2}",
            "4, cpus",
            "workers.min",
            "hold none, the 4 tensor-parallel workers of a group wholly on one node",
        ),
    ],
)
def test_what_does_not_go_together(job: str, marker: str, path: str, words: str, tmp_path: Path) -> None:
    text = f"{NODES}train_jobs:\n  j: {{{job}}}\n"
    (found,) = mistakes(tmp_path, text)
    assert found.path == f"train_jobs.j.{path}"
    assert words in found.message
    assert (found.line, found.column) == position(text, marker)


@pytest.mark.parametrize(
    "job",
    [
        "parallel: {strategy: data_parallel}, workers: {gpus: 4}",
        "parallel: {strategy: ddp, tensor: 4, fsdp: {param_dtype: bf16}}, workers: {min: 8}",
        "parallel: {strategy: hsdp, tensor: 2, context: 2, shard: 2}, workers: {min: 8}",
        "parallel: {strategy: zero3, offload: false}, workers: {min: 2}",
        "parallel: {strategy: zero1, ddp: {compression: powersgd, powersgd_rank: 4}}, workers: {min: 2}",
        "parallel: {context: 4, context_method: ring}, workers: {min: 4, gpus: 1}",
        "parallel: {ddp: {sync_batch_norm: true}}, workers: {gpus: 1}",
        "optimizer: {name: sgd, schedule: warmup_stable_decay, warmup_steps: 5, decay_steps: 5}, steps: 10",
    ],
)
def test_what_goes_together(job: str, tmp_path: Path) -> None:
    load(tmp_path, f"{NODES}train_jobs:\n  j: {{{job}}}\n", [])
