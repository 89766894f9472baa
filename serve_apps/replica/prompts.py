"""From what the client sent to token ids: tokenizer and chat template of the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_apps.engine.token_pieces import TokenPieces
from serve_apps.openai.errors import ApiError, bad_request
from serve_apps.replica.chat_template import ChatTemplate

_END = 8
"""Tokens that are enough to see whether a prompt leaves the model's reasoning open."""


class Prompts:
    """The tokenizer of a served model, as requests need it.

    Args:
        directory: a Hugging Face model directory with a tokenizer in it.
    """

    def __init__(self, directory: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.template = ChatTemplate(self.tokenizer)
        self._num_tokens = len(self.tokenizer)
        self.piece = TokenPieces(self.tokenizer).of
        """The text and the bytes of a token id."""

    def encode(self, request: Mapping[str, Any]) -> list[int]:
        """Token ids of a request's `messages` (by its `template`, see `ChatRequest.template`), or of its
        `prompt` (text, or ids already).

        Raises:
            ApiError: 400, the prompt is empty, holds ids that the model does not know, or is nothing that the
                model's chat template or its tokenizer can do with.
        """
        if "messages" in request:
            param = "messages"
            text = self.template.render(request["messages"], request.get("template") or {})
            ids = self._ids(text, param, special_tokens=not self.template.writes_special_tokens)
        elif isinstance(request["prompt"], str):
            param = "prompt"
            ids = self._ids(request["prompt"], param)
        else:
            ids = list(request["prompt"])
            param = "prompt"
            unknown = next((token for token in ids if token >= self._num_tokens), None)
            if unknown is not None:
                raise self._unknown_token(unknown, param)
        if not ids:
            raise bad_request("The prompt is empty; give at least one token.", param=param)
        return ids

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts that answers do not show."""
        added = self.tokenizer.added_tokens_decoder.values()
        return frozenset(token.content for token in added if token.special)

    def token_of(self, text: str) -> int | None:
        """The token that a text is all of, among those added to the vocabulary; None: there is none."""
        token = self.tokenizer.get_added_vocab().get(text)
        return None if token is None else int(token)

    def end_of(self, prompt_ids: Sequence[int]) -> str:
        """The text of a prompt's last tokens, special tokens included."""
        return str(self.tokenizer.decode(prompt_ids[-_END:]))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            ApiError: 400, an id that the model does not know.
        """
        unknown = next((token for token in tokens if token >= self._num_tokens), None)
        if unknown is not None:
            raise self._unknown_token(unknown, "tokens")
        try:
            return str(self.tokenizer.decode(tokens))
        except Exception as error:
            raise _not_for_tokenizer("tokens", error) from error

    def _unknown_token(self, token: int, param: str) -> ApiError:
        return bad_request(
            f"Token id {token} is not in the model's vocabulary (0 to {self._num_tokens - 1}).", param=param
        )

    def _ids(self, text: str, param: str, *, special_tokens: bool = True) -> list[int]:
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        except Exception as error:
            raise _not_for_tokenizer(param, error) from error
        return ids


def _not_for_tokenizer(param: str, error: Exception) -> ApiError:
    return bad_request(
        f"The model's tokenizer cannot read '{param}': {type(error).__name__}: {error}.",
        param=param,
        code="tokenizer_failed",
    )
