"""FSDP2 with a distributed checkpoint of model and optimizer: in the style of PyTorch's own recipes."""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--exit-at", type=int)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,))
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

first = 0
done = sorted(path for path in args.checkpoints.glob("step-*") if (path / ".metadata").exists())
if done:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=done[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = state["step"]
    if rank == 0:
        print(f"resumed from {done[-1].name}", flush=True)

for step in range(first, args.steps):
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(8, 64, generator=generator)
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}/{args.steps} loss {loss.item():.4f}", flush=True)
    if (step + 1) % args.save_every == 0:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step + 1}
        dcp.save(state, checkpoint_id=args.checkpoints / f"step-{step + 1:05d}")
    time.sleep(args.delay)
    if step + 1 == args.exit_at:
        sys.exit(3)
dist.destroy_process_group()
