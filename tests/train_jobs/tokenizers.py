"""A small tokenizer of every kind that a model may bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.train_jobs.ranks import WORDS
from train_jobs.data.own_tokenizer import train_tokenizer

TEXTS = [f"{WORDS}\nuser assistant system hello < | > / . , im_start im_end end of text s ? ( )"] * 20
_OF_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL = ["<unk>", "<s>", "</s>"]


def _in_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


def _llama_like(pre_tokenizer: Any, normalizer: Any = None) -> PreTrainedTokenizerBase:
    """Blanks are ▁, and a text is one word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = [*_SPECIAL, *_OF_BYTES]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _in_transformers(tokenizer)


def _unigram() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=90, unk_token="<unk>", special_tokens=_SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _in_transformers(tokenizer)


def _word_pieces() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _in_transformers(tokenizer)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte level": lambda: train_tokenizer(TEXTS, 400),
    "first": lambda: _llama_like(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": lambda: _llama_like(pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "prepended": lambda: _llama_like(
        None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "unigram": _unigram,
    "word pieces": _word_pieces,
    "in Python": ByT5Tokenizer,
}
