"""Causal language modelling on transformers' own model classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor, nn

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.models.directory_here import directory_here
from train_jobs.data.samples import IGNORED, DocumentSamples, PackedSamples
from train_jobs.data.source import Batch
from train_jobs.data.token_streams import TokenStreams
from train_jobs.tasks.task import Sums
from train_jobs.tasks.weights import cast, export_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


GENERATION = "generation_config.json"


class CausalLM:
    """Builds the model of a job and computes its loss.

    Args:
        config: the job.
        data: the run's directory of prepared data.
    """

    unit = "tokens"
    collate = None
    builds_on_meta = True

    def __init__(self, config: TrainJobConfig, data: Path) -> None:
        self.config = config
        self.streams = TokenStreams(data)
        self.content = self.streams.content
        self.architecture: PretrainedConfig | None = None

    def build(self) -> PreTrainedModel:
        """The model with its initial weights, fp32, on the CPU; the same on every rank.

        Raises:
            RequestError: model.directory does not hold a causal language model, or the tokenizer knows more
                tokens than the model.
        """
        torch.manual_seed(self.config.seed)
        directory = self.config.model.directory
        model = self._from_sizes() if directory is None else self._from_directory(directory)
        if self.streams.vocab_size > model.config.vocab_size:
            raise RequestError(
                f"the tokenizer knows {self.streams.vocab_size} tokens, the model only "
                f"{model.config.vocab_size}"
            )
        self.architecture = model.config
        return model

    @staticmethod
    def _from_directory(directory: str) -> PreTrainedModel:
        from transformers import AutoConfig, AutoModelForCausalLM

        here = directory_here(directory)
        try:
            if torch.get_default_device().type == "meta":
                architecture = AutoConfig.from_pretrained(here, local_files_only=True)
                return AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
            return AutoModelForCausalLM.from_pretrained(here, dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError) as error:
            raise RequestError(
                f"model.directory {directory!r} holds no causal language model: {error}"
            ) from error

    def _from_sizes(self) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = self.config.model
        architecture = LlamaConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.mlp_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.kv_heads,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.max_position_embeddings,
            tie_word_embeddings=sizes.tie_word_embeddings,
            bos_token_id=None,  # the tokenizer's, when it is written
            eos_token_id=None,
        )
        return AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)

    def samples(self, held_out: bool) -> PackedSamples | DocumentSamples:
        stream = self.streams.held_out if held_out else self.streams.train
        data = self.config.data
        if data.packing:
            return PackedSamples(stream.tokens, data.sequence_length, keep_tail=held_out)
        return DocumentSamples(
            stream.tokens,
            stream.starts,
            data.sequence_length,
            micro=self.config.batch.micro,
            multiple=self.config.parallel.context,
            group_by_length=data.group_by_length and not held_out,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Summed cross-entropy in nats over the targets that count.

        Args:
            batch: `input_ids` and `targets` (the next tokens, IGNORED where nothing is to be predicted), both
                [samples, length]; `position_ids` [1, length] where they do not count from 0.
        """
        inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
        targets = batch["targets"]
        logits = model(**inputs, use_cache=False).logits
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return Sums(total, (targets != IGNORED).sum())

    def export(self, weights: dict[str, Tensor], directory: Path) -> None:
        """Write the Hugging Face format: safetensors, config.json, how it generates, and the tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert self.architecture is not None, "the model was not built"
        source = self.config.model.directory
        tokenizer = AutoTokenizer.from_pretrained(self.streams.tokenizer_directory, local_files_only=True)
        dtype = export_dtype(self.config)
        # The model in use may have been wrapped or sharded; an empty one of the same architecture names the
        # files and ties the weights as transformers does.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.architecture, dtype=dtype)
        if source is None:
            _take_ends(model, tokenizer)
        model.save_pretrained(directory, state_dict=cast(weights, dtype))
        generation = None if source is None else Path(directory_here(source)) / GENERATION
        if generation is not None and generation.exists():
            # As it is: its end tokens and its temperature are nothing that training changes.
            shutil.copyfile(generation, directory / GENERATION)
        tokenizer.save_pretrained(directory)


def _take_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A new model begins and ends texts as the tokenizer does that its data was made with."""
    for known in (model.config, model.generation_config):
        known.bos_token_id = tokenizer.bos_token_id
        known.eos_token_id = tokenizer.eos_token_id
    # Not in config.json: whoever trained the model further would find that this token's embedding stands
    # still, be it the end's.
    model.generation_config.pad_token_id = tokenizer.pad_token_id
