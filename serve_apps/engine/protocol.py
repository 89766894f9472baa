"""The contract between a replica and whatever generates its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when a request ends; the names and meanings of OpenAI and vLLM."""

    max_tokens: int = 16
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; they are not part of the answer."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report with each token (0: only the token's own); None reports nothing."""


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token with its natural-log probability and the likeliest alternatives."""

    token: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()
    """(token, token id, logprob) of the likeliest tokens, best first."""


@dataclass(frozen=True)
class Delta:
    """What one request gained in one or more engine steps; the last one carries `finish_reason`."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Statistics:
    """A look into the engine, for metrics and autoscaling."""

    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    """Tokens whose keys and values are held now."""
    cache_tokens: int = 0
    """Tokens for which there is room."""
    generated_tokens: int = 0
    """Tokens generated since the start."""
    steps: int = 0
    """Forward passes since the start."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine needs to know to start; the same for every rank of a replica."""

    model_path: str
    tensor: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    max_batch: int = 32
    """Requests that run at once."""
    max_waiting: int = 128
    """Requests that may wait beside those; more raise QueueFullError."""
    context_length: int | None = None
    """Most tokens of prompt and answer together; None takes the model's max_position_embeddings."""
    threads: int = 1
    """torch threads a rank."""
    extra: dict[str, Any] = field(default_factory=dict)


class EngineError(Exception):
    """The engine is broken (a rank died, a forward pass failed); its replica must be replaced."""


class QueueFullError(Exception):
    """As many requests wait as may wait; try again later."""


class PromptError(ValueError):
    """The request cannot be run by this model (too long, empty); the message says why."""


class Engine(Protocol):
    """What a replica needs of an engine. All methods are called from one event loop."""

    context_length: int

    async def start(self) -> None:
        """Load the model on all ranks; return when requests can be taken."""

    def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams
    ) -> AsyncIterator[Delta]:
        """Run one request; closing or cancelling the iterator aborts it.

        Raises:
            PromptError: the prompt is empty, or too long for the model with the answer asked for.
            QueueFullError: as many requests wait as may wait.
            EngineError: the engine broke while the request was in it.
        """

    async def abort(self, request_id: str) -> None:
        """End a request now and free its place; nothing happens when it is not there."""

    def statistics(self) -> Statistics: ...

    def check(self) -> None:
        """Raise EngineError when the engine cannot go on."""

    async def stop(self) -> None:
        """End all requests and free the model."""
