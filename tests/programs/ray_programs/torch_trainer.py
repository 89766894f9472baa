"""Ray Train by itself: in the style of its guide on checkpoints and fault tolerance."""

import argparse
import os
import sys
import tempfile
import time

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train_func(config):
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            saved = torch.load(os.path.join(directory, "model.pt"))
            model.module.load_state_dict(saved["model"])
            start = saved["epoch"] + 1
        print(f"restored, from epoch {start} on", flush=True)
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(start, config["epochs"]):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * epoch + rank))
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(config["delay"])
        if epoch == config["exit_at"]:
            raise ValueError("asked to fail")
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if rank == 0:
                torch.save(
                    {"epoch": epoch, "model": model.module.state_dict()}, os.path.join(directory, "model.pt")
                )
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report({"loss": loss.item(), "epoch": epoch, "pid": os.getpid()}, checkpoint=checkpoint)
        if rank == 0:
            print(f"epoch {epoch}, pid {os.getpid()}", flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--storage", required=True)
parser.add_argument("--name", default="plain")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--exit-at", type=int, default=-1)
args = parser.parse_args()
trainer = TorchTrainer(
    train_func,
    train_loop_config={"epochs": args.epochs, "delay": args.delay, "exit_at": args.exit_at},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name=args.name,
        storage_path=args.storage,
        checkpoint_config=CheckpointConfig(num_to_keep=2),
        failure_config=FailureConfig(max_failures=0 if args.exit_at >= 0 else 3),
    ),
)
try:
    result = trainer.fit()
except ray.train.TrainingFailedError as error:
    print(f"failed: {error}", flush=True)
    sys.exit(3)
print(f"done: epoch {result.metrics['epoch']}, at {result.path}", flush=True)
