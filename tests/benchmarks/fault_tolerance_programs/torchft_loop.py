"""The loop under Ray Train's TorchftConfig, replica groups of one worker: as Ray's own example has it."""

import json
import os
import sys
import time
from datetime import timedelta

import numpy as np
import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport
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
    rank = ray.train.get_context().get_world_rank()
    model = LlamaForCausalLM(LlamaConfig(**settings["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group = ProcessGroupGloo(timeout=timedelta(seconds=30))
    transport = PGTransport(group, timeout=timedelta(seconds=30), device=torch.device("cpu"))

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        world_size=1,
        rank=0,
        replica_id=f"train_ddp_{rank}",
        timeout=timedelta(seconds=60),
        checkpoint_transport=transport,
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer_of_manager = Optimizer(manager, optimizer)
    dataset = Windows(settings)
    sampler = DistributedSampler(
        dataset,
        replica_rank=rank,
        num_replica_groups=settings["workers"],
        group_rank=0,
        num_replicas=1,
        shuffle=False,
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=settings["batch"], sampler=sampler)
    log = open(os.path.join(settings["out"], f"{os.getpid()}.jsonl"), "a", buffering=1)
    for indices, windows in loader:
        before = manager.current_step()
        optimizer_of_manager.zero_grad()
        logits = wrapped(windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer_of_manager.step()
        step = manager.current_step()
        line = {"time": time.time(), "step": step, "samples": indices.tolist(), "counts": step > before}
        log.write(json.dumps(line) + "\n")
    manager.shutdown()


if __name__ == "__main__":
    settings = json.loads(open(sys.argv[1]).read())
    if settings["python_path"]:
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": settings["python_path"]}})
    trainer = TorchTrainer(
        main,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=settings["workers"]),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=RunConfig(storage_path=settings["storage"], failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()
