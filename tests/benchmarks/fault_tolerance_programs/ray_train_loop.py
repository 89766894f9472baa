"""The loop under Ray Train alone, with a checkpoint every 20 steps: as its guide on faults has it."""

import json
import os
import sys
import tempfile
import time

import numpy as np
import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from transformers import LlamaConfig, LlamaForCausalLM


class Windows(torch.utils.data.Dataset):
    def __init__(self, settings):
        self.tokens = np.load(settings["tokens"], mmap_mode="r")
        self.length = settings["length"]

    def __len__(self):
        return 1_000_000  # more than are drawn: the tokens come again and again

    def __getitem__(self, index):
        first = index % ((len(self.tokens) - 1) // self.length) * self.length
        return index, torch.from_numpy(self.tokens[first : first + self.length + 1].astype(np.int64))


def main(settings):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = prepare_model(LlamaForCausalLM(LlamaConfig(**settings["model"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = open(os.path.join(settings["out"], f"{os.getpid()}.jsonl"), "a", buffering=1)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    dataset = Windows(settings)
    rest = torch.utils.data.Subset(
        dataset, range(step * settings["batch"] * settings["workers"], len(dataset))
    )
    loader = prepare_data_loader(torch.utils.data.DataLoader(rest, batch_size=settings["batch"]))
    for indices, windows in loader:
        optimizer.zero_grad()
        logits = model(windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        step += 1
        log.write(json.dumps({"time": time.time(), "step": step, "samples": indices.tolist()}) + "\n")
        if step % 20 == 0:
            with tempfile.TemporaryDirectory() as directory:
                saved = None
                if ray.train.get_context().get_world_rank() == 0:
                    state = {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    }
                    torch.save(state, os.path.join(directory, "state.pt"))
                    saved = Checkpoint.from_directory(directory)
                ray.train.report({"loss": loss.item()}, checkpoint=saved)


if __name__ == "__main__":
    settings = json.loads(open(sys.argv[1]).read())
    trainer = TorchTrainer(
        main,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=settings["workers"]),
        run_config=RunConfig(
            storage_path=settings["storage"],
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()
