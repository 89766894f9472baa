"""A Hugging Face Trainer script, started by torchrun as it is."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

directory = sys.argv[1]
torch.manual_seed(0)
rows = torch.arange(64 * 16).reshape(64, 16) % 50
data = [{"input_ids": row, "labels": row} for row in rows]
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
)
trainer = Trainer(
    LlamaForCausalLM(config),
    TrainingArguments(
        directory,
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    ),
    train_dataset=data,
)
result = trainer.train()
print(f"world size {trainer.args.world_size}, loss {result.training_loss:.4f}", flush=True)
trainer.save_model(directory)
