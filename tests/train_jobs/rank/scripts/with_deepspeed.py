"""A DeepSpeed script, ZeRO stage 2, started by torchrun as it is."""

import deepspeed
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
settings = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
for step in range(60):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * size + rank))
    loss = (engine(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
print(f"rank {rank} of {size}, loss {loss.item():.6f}", flush=True)
