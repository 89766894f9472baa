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

    def encode(self, request: Mapping[str, Any], *, may_be_empty: bool = False) -> list[int]:
        """Token ids of a request's `messages` (by its `template`, see `ChatRequest.template`), or of its
        `prompt` (text, or ids already).

        Raises:
            ApiError: 400, the prompt is empty, holds ids that the model does not know, or is nothing that the
                model's chat template or its tokenizer can do with.
        """
        if "messages" in request:
            param = "messages"
            text = self.template.render(request["messages"], request.get("template") or {})
            special_tokens = request.get("special_tokens", not self.template.writes_special_tokens)
            ids = self._ids(text, param, special_tokens=special_tokens)
        elif isinstance(request["prompt"], str):
            param = "prompt"
            ids = self._ids(request["prompt"], param, special_tokens=request.get("special_tokens", True))
        else:
            ids = list(request["prompt"])
            param = "prompt"
            unknown = next((token for token in ids if token >= self._num_tokens), None)
            if unknown is not None:
                raise self._unknown_token(unknown, param)
        if not ids and not may_be_empty:
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

    def names(self, tokens: Sequence[int]) -> list[str]:
        """How the tokenizer itself writes each of these tokens."""
        return [str(name) for name in self.tokenizer.convert_ids_to_tokens(list(tokens))]

    def info(self) -> dict[str, Any]:
        """The tokenizer's config, as its own file has it, without paths."""
        kept = {name: value for name, value in self.tokenizer.init_kwargs.items() if name not in _PATHS}
        info = {
            **_plain(kept),
            "tokenizer_class": type(self.tokenizer).__name__,
            "eos_token": self.tokenizer.eos_token,
            "bos_token": self.tokenizer.bos_token,
        }
        return info if self.template.usual is None else {**info, "chat_template": self.template.usual}

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


_PATHS = (
    "vocab_file",
    "merges_file",
    "tokenizer_file",
    "name_or_path",
    "tokenizer_object",
    "__slow_tokenizer",
)


def _plain(value: Any) -> Any:
    """What JSON has, of what a tokenizer was made with."""
    if hasattr(value, "content"):
        return str(value.content)
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _not_for_tokenizer(param: str, error: Exception) -> ApiError:
    return bad_request(
        f"The model's tokenizer cannot read '{param}': {type(error).__name__}: {error}.",
        param=param,
        code="tokenizer_failed",
    )
