"""A plain torchrun script, as people write one: transformers' Llama under DDP or FSDP2, nothing of Shoal's.

    torchrun --nproc-per-node 2 tests/benchmarks/plain_training.py SETTINGS.json

SETTINGS.json: strategy (ddp or fsdp), model (sizes of a LlamaConfig), tokens (a .npy of the whole corpus),
sequence_length, global_batch, micro, steps, seed, learning_rate, out (where the seconds of each step are
written).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def spread(model: LlamaForCausalLM, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings["seed"])
    model = spread(LlamaForCausalLM(LlamaConfig(**settings["model"])), settings["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], fused=True)
    tokens = np.load(settings["tokens"], mmap_mode="r")
    length, micro = settings["sequence_length"], settings["micro"]
    share = settings["global_batch"] // size
    order = np.random.default_rng(settings["seed"]).permutation((len(tokens) - 1) // length)
    seconds = []
    for step in range(settings["steps"]):
        began = time.perf_counter()
        first = step * settings["global_batch"] + rank * share
        mine = order[first : first + share]
        for start in range(0, share, micro):
            rows = np.stack(
                [tokens[i * length : i * length + length + 1] for i in mine[start : start + micro]]
            )
            batch = torch.from_numpy(rows.astype(np.int64))
            last = start + micro >= share
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            else:
                model.require_backward_grad_sync = last
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss * micro / share).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)  # what everybody logs
        mean.item()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        Path(settings["out"]).write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
