"""What a job's samples and their order are known by: where it changes, positions mean other samples."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from cluster.config.sections.train import TrainJobConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from train_jobs.data.source import Samples, StreamSamples

_PLACES = {"is_local", "local_files_only", "name_or_path", "tokenizer_file", "vocab_file", "merges_file"}
"""Of what a tokenizer was made with: where it was read from."""


def samples_identity(config: TrainJobConfig, samples: Samples | StreamSamples, content: str | None) -> str:
    """The same for the same samples in the same order, as far as can be told.

    Args:
        content: a digest of what the samples are cut from; None where a task reads its data itself.
    """
    from train_jobs.data.source import StreamSamples  # takes torch with it, which a driver does without

    known: dict[str, Any] = {"content": content or [config.task, config.source], "seed": config.seed}
    if not isinstance(samples, StreamSamples):
        known["samples"] = len(samples)
    if not config.is_custom:
        data = config.data
        known["cut"] = [data.sequence_length, data.packing, data.shuffle_row_groups]
        # Neighbours of similar length are put together for one micro-batch; an older version did so in
        # another order.
        known["grouped"] = ["in windows", config.batch.micro] if data.group_by_length else None
    return digest(known)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The same for tokenizers that make the same tokens, wherever they lie; None where that cannot be told:
    of those that are written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    settings = {name: str(value) for name, value in tokenizer.init_kwargs.items() if name not in _PLACES}
    known = [type(tokenizer).__name__, settings, str(tokenizer.chat_template), backend.to_str()]
    return digest(known)


def digest(facts: Any) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
