"""How many tokens a request may take, before anybody has counted those of its prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_apps.openai.schema import CompletionRequest, Request

BYTES_A_TOKEN = 4
"""Of words that are written in ASCII."""
USUAL_ANSWER_TOKENS = 1024
"""What an answer is taken to need whose request names no length."""

_ASCII = bytes(range(128))
_ESCAPE_BYTES, _ESCAPE_TOKENS = len(rb"\u4e2d"), len("中".encode())
"""Of a character that JSON has as an escape; no escape stands for more bytes of UTF-8."""


def expected_tokens(request: Request, most: int | None, body: bytes) -> int:
    """About how many tokens a request may take.

    Args:
        most: tokens of each answer; None: the request says nothing of it.
    """
    prompts = prompt_tokens(request.prompt) if isinstance(request, CompletionRequest) else text_tokens(body)
    return prompts + request.num_choices * (USUAL_ANSWER_TOKENS if most is None else most)


def prompt_tokens(prompts: Iterable[str | Sequence[int]]) -> int:
    """About how many tokens prompts have; of those that are tokens, how many it is."""
    return sum(text_tokens(prompt.encode()) if isinstance(prompt, str) else len(prompt) for prompt in prompts)


def text_tokens(text: bytes) -> int:
    """About how many tokens a text has, or the JSON that it stands in.

    Beyond ASCII each byte is taken for a token: no tokenizer makes more of them, and for Chinese, where four
    bytes are little more than one character, some do not make fewer.
    """
    more = b"" if text.isascii() else text.translate(None, _ASCII)
    escaped = text.count(b"\\u")
    plain = max(0, len(text) - len(more) - _ESCAPE_BYTES * escaped)
    return plain // BYTES_A_TOKEN + _ESCAPE_TOKENS * escaped + len(more) + 1
