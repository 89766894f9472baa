"""The tokenizer that a job trains on its own documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cluster.config.sections.data import DataConfig
from cluster.wording import counted
from train_jobs.data.documents import read_documents
from train_jobs.data.remaining import RemainingWork

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
_WORD_BYTES = 1000
"""A word that is longer is trained on in pieces: what one costs grows with the square of its length."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of at most `vocab_size` tokens, in transformers' own class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(_WORD_BYTES)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def texts_to_train_on(data: DataConfig, tell: Callable[[str], None]) -> Iterator[str]:
    """All documents that are not held out.

    Args:
        tell: told with each how far that is, and at the end that the rest is the trainer's.

    Raises:
        RequestError: as of read_documents.
    """
    remaining, number = RemainingWork(), 0
    for document in read_documents(data, remaining.at):
        tell(f"training a tokenizer: read {counted(number, 'document')} so far{remaining.left}")
        if not document.held_out:
            number += 1
            yield document.text
    tell(f"training a tokenizer: making its tokens of the words of {counted(number, 'document')}")
