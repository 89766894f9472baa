"""DeepSpeed, ZeRO stage 2, from its command line: in the style of its getting-started guide."""

import argparse
import os
import sys
import time

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--save_interval", type=int, default=20)
parser.add_argument("--save_dir", default="checkpoints")
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--exit_at", type=int)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model_engine, optimizer, _, _ = deepspeed.initialize(
    args=args, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)
)
first = 0
if os.path.exists(os.path.join(args.save_dir, "latest")):
    _, client_sd = model_engine.load_checkpoint(args.save_dir)
    first = client_sd["step"]
    print(f"resumed from step {first}", flush=True)
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
for step in range(first, args.steps):
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step * world_size + rank))
    loss = torch.nn.functional.mse_loss(model_engine(inputs), inputs.sum(dim=1, keepdim=True))
    model_engine.backward(loss)
    model_engine.step()
    if rank == 0:
        print(f"step {step + 1}/{args.steps} loss {loss.item():.4f}", flush=True)
    if (step + 1) % args.save_interval == 0:
        model_engine.save_checkpoint(args.save_dir, client_state={"step": step + 1})
    time.sleep(args.delay)
    if step + 1 == args.exit_at:
        sys.exit(3)
