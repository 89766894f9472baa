"""A tokenizer's special tokens by other names, so that they are told from text that looks like them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

_RARE = range(0x2A6D6, 0x20000, -1)
"""Ideographs that hardly any text has, and that templates and normalizers leave as they are."""


class RenamedTokens:
    """A copy of a tokenizer that knows each special token by a name: a character that a text does not have.

    `hide` puts names for all in a text that looks like special tokens. What comes to the text after that,
    from a chat template, has special tokens of its own. `encode` takes those for special tokens, and the
    names for the text that they stand for: all of it is one text to the tokenizer, as ever.

    Args:
        text: has none of the names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        from tokenizers import AddedToken

        special = special_tokens(tokenizer)
        taken = {*text, *"".join(tokenizer.get_added_vocab())}
        rare = (character for character in map(chr, _RARE) if character not in taken)
        self._names = {token.content: next(rare) for token in special.values()}
        self._gap = next(rare)
        """Belongs to no text; keeps what is on both sides of it apart."""
        apart = self._names if not tokenizer.is_fast else made_of_text(tokenizer)
        self._texts = {
            name: self._torn(text.strip()) if text in apart else text.strip()
            for text, name in self._names.items()
        }
        self._to_hide = any_of(text for text in self._names if text.strip())
        self._to_swap = any_of([*self._names, *self._texts])
        self._copy = copy.deepcopy(tokenizer)
        self._copy.add_tokens(
            [_another(token, self._names[token.content]) for token in special.values()]
            + [AddedToken(self._gap, normalized=False)]
        )
        indices = self._copy.get_added_vocab()
        self._indices = {indices[self._names[token.content]]: index for index, token in special.items()}
        self._gap_index = indices[self._gap]

    def has_names_in(self, text: str) -> bool:
        return not {*self._texts, self._gap}.isdisjoint(text)

    def hide(self, text: str) -> str:
        # Blanks at the edge of a token stay: a template may trim them.
        return self._to_hide.sub(
            lambda found: found[0].replace(found[0].strip(), self._names[found[0]]), text
        )

    def encode(self, text: str) -> list[int]:
        swapped = self._to_swap.sub(lambda found: self._names.get(found[0]) or self._texts[found[0]], text)
        # A tokenizer that is written in Python would take no name for a token then.
        tokens = as_text(self._copy, [swapped], split=self._copy.is_fast)[0]
        return [self._indices.get(token, token) for token in tokens if token != self._gap_index]

    def _torn(self, text: str) -> str:
        return f"{text[:1]}{self._gap}{text[1:]}"


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, AddedToken]:
    """Those of a tokenizer, by their index; what else was added to it are tokens in any text."""
    named = set(tokenizer.all_special_tokens)
    return {
        index: token
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special or token.content in named
    }


def as_text(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, split: bool = True
) -> list[list[int]]:
    """The tokens of texts.

    Args:
        split: special tokens are text, too.
    """
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=split, verbose=False)
    tokens: list[list[int]] = encoded["input_ids"]
    return tokens


def made_of_text(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Special tokens that a tokenizer makes of their text even so: those in the table of a Unigram model."""
    special = {token.content: index for index, token in special_tokens(tokenizer).items()}
    encoded = zip(special.items(), as_text(tokenizer, list(special)), strict=True)
    return {text for (text, index), tokens in encoded if index in tokens and index != tokenizer.unk_token_id}


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of them that begins at a place."""

    def either(texts: Iterable[str]) -> str:
        return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"

    texts = list(texts)
    # Many a tokenizer has a thousand: at most places a look at how they begin is enough.
    return re.compile(f"(?={either({text[:3] for text in texts})})(?:{either(texts)})")


def _another(token: AddedToken, name: str) -> AddedToken:
    return type(token)(
        name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=False
    )
