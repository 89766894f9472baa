"""Words that an answer may not hold, as the tokens that would spell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_apps.engine.protocol import PromptError


def spellings(words: Sequence[str], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """The tokens of each word at the beginning of a text and after a blank, as vLLM takes them.

    With a blank a word counts only where that makes another first token of it, and no more tokens.

    Args:
        tokenizer: the model's, from transformers.
        vocab_size: of the model's logits; what has other tokens never comes.

    Raises:
        PromptError: the tokenizer has no tokens for a word.
    """
    spelt = []
    for word in words:
        bare, after_blank = (
            tokenizer.encode(blank + word.lstrip(), add_special_tokens=False) for blank in ("", " ")
        )
        if not bare:
            raise PromptError(f"the word {word!r} has no tokens", "bad_words")
        spelt.append(bare)
        if after_blank and after_blank[0] != bare[0] and len(after_blank) == len(bare):
            spelt.append(after_blank)
    return [tokens for tokens in spelt if max(tokens) < vocab_size]
