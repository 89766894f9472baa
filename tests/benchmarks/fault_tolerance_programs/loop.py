"""One process: the loop that the other programs here make distributed."""

import json
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
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
    model = LlamaForCausalLM(LlamaConfig(**settings["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Windows(settings)
    loader = torch.utils.data.DataLoader(dataset, batch_size=settings["batch"])
    log = open(os.path.join(settings["out"], f"{os.getpid()}.jsonl"), "a", buffering=1)
    step = 0
    for indices, windows in loader:
        optimizer.zero_grad()
        logits = model(windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        step += 1
        log.write(json.dumps({"time": time.time(), "step": step, "samples": indices.tolist()}) + "\n")


if __name__ == "__main__":
    main(json.loads(open(sys.argv[1]).read()))
