"""Causal language modelling on transformers' own model classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor, nn

from cluster.config.train_section import TrainJobConfig
from cluster.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

IGNORED = -100
"""Target that no loss counts, as in torch and transformers."""


class CausalLM:
    """Builds the model of a job and computes its loss; one object a rank.

    Args:
        config: the job.
        vocab_size: tokens that the job's tokenizer knows.
    """

    def __init__(self, config: TrainJobConfig, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size

    def build(self) -> PreTrainedModel:
        """The model with its initial weights, fp32, on the CPU; the same on every rank.

        Raises:
            RequestError: model.directory does not hold a causal language model, or the tokenizer knows more
                tokens than the model.
        """
        from transformers import AutoModelForCausalLM

        torch.manual_seed(self.config.seed)
        if self.config.model.directory is not None:
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    self.config.model.directory, dtype=torch.float32, local_files_only=True
                )
            except (OSError, ValueError) as error:
                raise RequestError(
                    f"model.directory {self.config.model.directory!r} holds no causal language model: {error}"
                ) from error
        else:
            model = AutoModelForCausalLM.from_config(self._from_sizes(), dtype=torch.float32)
        if self.vocab_size > model.config.vocab_size:
            raise RequestError(
                f"the tokenizer knows {self.vocab_size} tokens, the model only {model.config.vocab_size}"
            )
        model.config.use_cache = False
        return model

    def _from_sizes(self) -> object:
        from transformers import LlamaConfig

        sizes = self.config.model
        return LlamaConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.mlp_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.kv_heads,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.max_position_embeddings,
            tie_word_embeddings=sizes.tie_word_embeddings,
            bos_token_id=0,
            eos_token_id=0,
        )

    @staticmethod
    def blocks(model: PreTrainedModel) -> list[nn.Module]:
        """The transformer blocks: the units that sharding works by.

        transformers names the classes of a model's blocks itself (`_no_split_modules`).
        """
        names = set(model._no_split_modules or ())
        return [module for module in model.modules() if type(module).__name__ in names]

    @staticmethod
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Summed cross-entropy in nats over the targets that count, and their number.

        Args:
            inputs: token ids, [batch, length].
            targets: the next tokens, [batch, length], IGNORED where nothing is to be predicted.
        """
        logits = model(input_ids=inputs, use_cache=False).logits
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total, int((targets != IGNORED).sum())

    @staticmethod
    def export(
        architecture: PretrainedConfig, weights: dict[str, Tensor], tokenizer: Path, directory: Path
    ) -> None:
        """Write the Hugging Face format: safetensors, config.json, generation_config.json and the tokenizer.

        Args:
            architecture: the model's configuration.
            weights: the whole state dict under the model's own names, on the CPU.
            tokenizer: directory of the job's tokenizer.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # The model in use may have been wrapped or sharded; an empty one of the same architecture names the
        # files and ties the weights as transformers does.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
        model.config.use_cache = True  # it was off for training only; who generates wants it
        model.save_pretrained(directory, state_dict=weights)
        AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).save_pretrained(directory)
