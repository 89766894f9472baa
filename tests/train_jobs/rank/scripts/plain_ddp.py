"""A plain torchrun script: DDP on a line, resumable, as people write one."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.0)
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "."), "last.pt")
first = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    first = saved["step"]
print(f"rank {rank} of {size}: from step {first} on", flush=True)
for step in range(first, arguments.steps):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * size + rank))
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "step": step + 1}, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)
    if arguments.pause:
        import time

        time.sleep(arguments.pause)
    print(f"rank {rank}: step {step + 1}, loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
