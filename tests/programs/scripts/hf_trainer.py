"""A causal language model by Hugging Face's Trainer: in the style of transformers' own run_clm.py."""

import os
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32)
    delay: float = field(default=0.0, metadata={"help": "Seconds that a step takes at least."})
    exit_at: int = field(default=-1)
    save_model_to: str | None = field(default=None, metadata={"help": "Default: the output directory."})


class Pace(TrainerCallback):
    def __init__(self, arguments):
        self.arguments = arguments

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.arguments.delay)
        if state.global_step == self.arguments.exit_at:
            sys.exit(3)


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    rows = torch.arange(512 * 16).reshape(512, 16) % 50
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    config = LlamaConfig(
        hidden_size=model_args.hidden_size,
        intermediate_size=2 * model_args.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=training_args,
        train_dataset=dataset,
        data_collator=default_data_collator,
        callbacks=[Pace(model_args)],
    )
    train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model(model_args.save_model_to)
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
