"""One request as the scheduler sees it: its tokens, its row and how it ended."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from serve_apps.engine.protocol import FinishReason


@dataclass(eq=False)
class Sequence:
    """The tokens of one request.

    `row` is its place in the batch and in the KV cache (None while it waits), `cached` how many of its
    tokens have their keys and values in the cache. Both belong to the scheduler.
    """

    request_id: str
    prompt_ids: Tokens[int]
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    """The tokens that end it; empty when it goes on regardless."""
    output_ids: list[int] = field(default_factory=list)
    row: int | None = None
    cached: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int) -> FinishReason | None:
        """Take one generated token; the reason when it completes the answer."""
        self.output_ids.append(token_id)
        if token_id in self.eos_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason
