"""Accelerate with checkpoints by steps: in the style of its own `complete_nlp_example.py`."""

import argparse
import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


def training_function(args):
    project = ProjectConfiguration(
        project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=3
    )
    accelerator = Accelerator(cpu=args.cpu, project_config=project)
    set_seed(42)
    inputs = torch.randn(1280, 8)
    train_dataloader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    overall_step = 0
    checkpoints = os.path.join(args.output_dir, "checkpoints")
    if args.resume and os.path.isdir(checkpoints) and os.listdir(checkpoints):
        newest = max(os.listdir(checkpoints), key=lambda name: int(name.rpartition("_")[2]))
        accelerator.load_state(os.path.join(checkpoints, newest))
        overall_step = (int(newest.rpartition("_")[2]) + 1) * args.checkpointing_steps
        project.iteration = int(newest.rpartition("_")[2]) + 1
        accelerator.print(f"Resumed from checkpoint: {newest}", flush=True)
    steps = len(train_dataloader)
    active_dataloader = accelerator.skip_first_batches(train_dataloader, overall_step)
    for features, targets in active_dataloader:
        loss = torch.nn.functional.mse_loss(model(features), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        overall_step += 1
        accelerator.print(f"step {overall_step}/{steps} loss {loss.item():.4f}", flush=True)
        if overall_step % args.checkpointing_steps == 0:
            accelerator.save_state()
        time.sleep(args.delay)
        if overall_step == args.exit_at:
            sys.exit(3)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--checkpointing_steps", type=int, default=20)
    parser.add_argument("--output_dir", type=str, default=".")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--exit_at", type=int)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
