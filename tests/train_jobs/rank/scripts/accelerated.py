"""An Accelerate script, started by torchrun as it is."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 4)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(10):
    for features, targets in loader:
        optimizer.zero_grad()
        loss = (model(features) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
print(
    f"process {accelerator.process_index} of {accelerator.num_processes}, loss {loss.item():.6f}", flush=True
)
del model, optimizer, loader, loss  # a process group that ends before its model may abort the process
accelerator.wait_for_everyone()
accelerator.end_training()
