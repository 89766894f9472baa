"""What each token of a tokenizer stands for, in bytes: joined, those of an answer are its text."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

from serve_apps.engine.protocol import UnsupportedError


def vocabulary_of(tokenizer: Any, vocab_size: int, end_ids: list[int]) -> Any:
    """llguidance's table of a tokenizer's tokens.

    Args:
        vocab_size: of the model's logits; a tokenizer may know more tokens, which never come.

    Raises:
        UnsupportedError: llguidance does not read this tokenizer.
    """
    from llguidance import hf

    try:
        return hf.from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=end_ids)
    except ValueError as error:
        raise UnsupportedError(f"the tokenizer's tokens are not known in bytes: {error}") from error


class TokenPieces:
    """The tokens of one tokenizer, from transformers; about a second is needed for a large one, once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(4096)(self._of)
        """Text and bytes of a token id. A token that is no text has its name as text, and no bytes."""

    def prepare(self) -> None:
        """Take the second now."""
        _ = self._vocabulary

    @cached_property
    def _vocabulary(self) -> Any:
        try:
            return vocabulary_of(self._tokenizer, len(self._tokenizer), [self._tokenizer.eos_token_id or 0])
        except UnsupportedError:
            return None

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    def _of(self, token_id: int) -> tuple[str, bytes]:
        if token_id in self._special:
            return str(self._tokenizer.convert_ids_to_tokens(token_id)), b""
        if self._vocabulary is None or token_id >= self._vocabulary.vocab_size:
            text = str(self._tokenizer.decode([token_id]))
            return text, text.encode("utf-8", "replace")
        piece: bytes = self._vocabulary.decode_bytes([token_id])
        return piece.decode("utf-8", "replace"), piece
