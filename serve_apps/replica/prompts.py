"""From what the client sent to token ids: tokenizer and chat template of the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_apps.openai.errors import ApiError, bad_request

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For a tokenizer that brings none: one line a turn, `role: text`."""


class Prompts:
    """The tokenizer of a served model, as requests need it.

    Args:
        directory: a Hugging Face model directory with a tokenizer in it.
    """

    def __init__(self, directory: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._template = self.tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
        self._num_tokens = len(self.tokenizer)

    def encode(self, request: Mapping[str, Any]) -> list[int]:
        """Token ids of a request's `messages`, or of its `prompt` (text, or ids already).

        Raises:
            ApiError: 400, the prompt is empty, holds ids that the model does not know, or does not suit the
                model's chat template.
        """
        if "messages" in request:
            ids = self._chat(request["messages"], request.get("tools"))
            param = "messages"
        elif isinstance(request["prompt"], str):
            ids = self.tokenizer(request["prompt"])["input_ids"]
            param = "prompt"
        else:
            ids = list(request["prompt"])
            param = "prompt"
            unknown = next((token for token in ids if token >= self._num_tokens), None)
            if unknown is not None:
                raise self._unknown_token(unknown, param)
        if not ids:
            raise bad_request("The prompt is empty; give at least one token.", param=param)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            ApiError: 400, an id that the model does not know.
        """
        unknown = next((token for token in tokens if token >= self._num_tokens), None)
        if unknown is not None:
            raise self._unknown_token(unknown, "tokens")
        return str(self.tokenizer.decode(tokens))

    def _unknown_token(self, token: int, param: str) -> ApiError:
        return bad_request(
            f"Token id {token} is not in the model's vocabulary (0 to {self._num_tokens - 1}).", param=param
        )

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError as error:
            raise bad_request(
                f"The messages do not suit this model's chat template: {error}.", param="messages"
            ) from error
        # A template writes the special tokens itself.
        own = self.tokenizer.chat_template is not None
        return self.tokenizer(text, add_special_tokens=not own)["input_ids"]
