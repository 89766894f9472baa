"""Documents as tokens: what they say stays text, also where it looks like a special token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.errors import RequestError
from train_jobs.data.documents import Document, Said
from train_jobs.data.renamed_tokens import RenamedTokens, any_of, as_text, made_of_text, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DocumentEncoder:
    """Encodes documents with one tokenizer.

    A page about `<|endoftext|>` does not end there, and who says `<|im_end|>` in a conversation goes on: the
    special tokens of a conversation are those that the tokenizer's chat template writes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = any_of(token.content for token in special_tokens(tokenizer).values())
        self._made_of_text = any_of(made_of_text(tokenizer))
        self._renamed: RenamedTokens | None = None

    def __call__(self, documents: Sequence[Document]) -> list[list[int]]:
        """The tokens of each document.

        Raises:
            RequestError: a conversation does not fit the tokenizer's chat template.
        """
        tokens = iter(self._of_texts([document.text for document in documents if document.chat is None]))
        return [
            next(tokens) if document.chat is None else self._of_chat(document.name, document.chat)
            for document in documents
        ]

    def _of_texts(self, texts: Sequence[str]) -> list[list[int]]:
        tokens = as_text(self._tokenizer, texts)
        for index, text in enumerate(texts):
            if self._made_of_text.search(text):
                renamed = self._renamed_for(text)
                tokens[index] = renamed.encode(renamed.hide(text))
        return tokens

    def _of_chat(self, name: str, chat: Sequence[Said]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise RequestError(
                f"{name} holds a conversation, and the tokenizer has no chat template;"
                " data.tokenizer, or model.directory, should name one that has"
            )
        said = [dict(each) for each in chat]
        try:
            if any(self._special.search(text) for text in _strings(said)):
                return self.of_hidden(said)
            tokens: Any = self._tokenizer.apply_chat_template(said, tokenize=True, return_dict=False)
        except Exception as error:  # a template raises what it likes
            raise RequestError(f"{name}: the tokenizer's chat template refuses it: {error}") from error
        return list(tokens)

    def of_hidden(self, chat: Sequence[Said]) -> list[int]:
        """The tokens of a conversation that says what special tokens look like."""
        renamed = self._renamed_for(f"{chat}{self._tokenizer.chat_template}")
        hidden = _hidden(chat, renamed)
        return renamed.encode(str(self._tokenizer.apply_chat_template(hidden, tokenize=False)))

    def _renamed_for(self, text: str) -> RenamedTokens:
        """One whose names the text does not have: nearly always the same, as a copy takes its time."""
        if self._renamed is None or self._renamed.has_names_in(text):
            self._renamed = RenamedTokens(self._tokenizer, text)
        return self._renamed


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _strings(part)


def _hidden(value: Any, renamed: RenamedTokens) -> Any:
    """The same, with names in place of special tokens in all of its strings."""
    if isinstance(value, str):
        return renamed.hide(value)
    if isinstance(value, Mapping):
        return {_hidden(key, renamed): _hidden(part, renamed) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_hidden(part, renamed) for part in value)
    return value
