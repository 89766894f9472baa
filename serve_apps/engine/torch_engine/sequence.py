"""One request as the scheduler sees it: its tokens, its blocks and how it ended."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from serve_apps.engine.protocol import FinishReason


@dataclass(eq=False)
class TokenSequence:
    """The tokens of one request.

    `slot`, `blocks`, `computed` and `arrival` belong to the scheduler: the number under which the ranks know
    it while it runs, the blocks of the KV cache that hold its tokens, how many of its tokens have their keys
    and values there, and when it came.
    """

    request_id: str
    prompt_ids: Tokens[int]
    max_tokens: int
    """Tokens to generate; 0 has the prompt read only, for its hidden states unless it is `scored`."""
    eos_ids: frozenset[int] = frozenset()
    """The tokens that end it; empty when it goes on regardless."""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    scored: bool = False
    """Whether the log-probabilities of the prompt's own tokens are wanted."""
    cache_salt: str = ""
    """It shares blocks with sequences of the same one only."""
    output_ids: list[int] = field(default_factory=list)
    arrival: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    """Tokens of the prompt that were in the cache when it ran for the first time."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        """Prompt and answer."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def scoring(self) -> bool:
        """Whether tokens of its prompt may still lack their log-probabilities."""
        return self.scored and not self.output_ids

    @property
    def decoding(self) -> bool:
        """Whether only its newest token is left to compute."""
        return self.computed == self.num_tokens - 1 and bool(self.output_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Whose turn comes first: by priority, then by arrival."""
        return self.priority, self.arrival

    def append(self, token_id: int) -> FinishReason | None:
        """Take one generated token; the reason when it completes the answer."""
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)
        if token_id in self.eos_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason
