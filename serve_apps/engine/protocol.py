"""The contract between a replica and whatever generates its tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from serve_apps.parsing.answer_parser import Reader

REPETITION_PENALTIES = 0.01, 100.0
"""The least and the most; much beyond them logits are no numbers any more."""

FinishReason = Literal["stop", "length", "abort"]
StructureKind = Literal["json_schema", "regex", "choice", "grammar"]
"""A field of SamplingParams that says what form an answer has."""
STRUCTURES: tuple[StructureKind, ...] = get_args(StructureKind)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when a request ends; the names and meanings of OpenAI and vLLM."""

    max_tokens: int = 16
    """Most tokens of the answer; 0, with `prompt_logprobs` alone, reads the prompt and answers nothing."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    seed: int | None = None
    min_p: float = 0.0
    """Drops tokens that are less likely than this part of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the answer holds already."""
    frequency_penalty: float = 0.0
    """Taken off it once for each time that the answer holds it."""
    repetition_penalty: float = 1.0
    """Divides the logit (multiplies a negative one) of each token of prompt and answer, as in vLLM;
    REPETITION_PENALTIES are its bounds."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)"""
    json_schema: str | None = None
    """A JSON schema (as JSON) that the answer keeps to, unless max_tokens ends it first. At most one of this
    field and the next three is given."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: tuple[str, ...] = ()
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar, in the language of Lark or of GBNF, that the answer keeps to."""
    reasoning: tuple[int | None, int] | None = None
    """The tokens that begin and end the model's reasoning; a structure holds behind it. None for the first:
    the prompt has begun it."""
    instead_token_ids: tuple[int, ...] = ()
    """Tokens with which the answer may begin in place of its structure, and go on as it likes."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may come; none named: any."""
    bad_words: tuple[str, ...] = ()
    """Words that the answer does not hold, as far as they are spelt with the tokens that the tokenizer uses
    for them, with a blank before them and without."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; they are not part of the answer."""
    include_stop: bool = False
    """The text has the stop string, or the text of the token, that ended it."""
    skip_special_tokens: bool = True
    """Special tokens are no part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer as an end of sequence does."""
    min_tokens: int = 0
    """Before so many tokens no end of sequence is chosen, unless nothing else may come."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report with each token (0: only the token's own); None reports nothing."""
    prompt_logprobs: int | None = None
    """As `logprobs`, of the prompt's tokens, all but the first."""

    @property
    def structure(self) -> tuple[StructureKind, str] | None:
        """The field that says what form the answer has, and its value as text (that of `choice` as JSON)."""
        if self.json_schema is not None:
            return "json_schema", self.json_schema
        if self.regex is not None:
            return "regex", self.regex
        if self.choice:
            return "choice", json.dumps(self.choice)
        return None if self.grammar is None else ("grammar", self.grammar)


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its natural-log probability and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, best first; where any are asked for, this one is among
    them, last if it is none of the likeliest."""
    rank: int = 0
    """Its place among all tokens, 1 for the likeliest; known of a prompt's tokens."""

    def __post_init__(self) -> None:
        if self.top and all(token_id != self.token_id for token_id, _ in self.top):
            object.__setattr__(self, "top", (*self.top, (self.token_id, self.logprob)))


@dataclass(frozen=True)
class Delta:
    """What one request gained in one or more engine steps; the last one carries `finish_reason`."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens but for the first, where they were asked for; the first delta has them all."""
    cached_tokens: int | None = None
    """The first delta says how many of the prompt's tokens were in the KV cache already."""
    stop_string: str | None = None
    """Of `SamplingParams.stop`, the one that ended the text."""


@dataclass(frozen=True)
class Statistics:
    """A look into the engine, for metrics and autoscaling."""

    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    """Part of the KV cache that requests hold, 0 to 1."""
    cache_tokens: int = 0
    """Tokens for which it has room."""
    cache_bytes: int = 0
    """Memory that it takes on one rank."""
    preempted: int = 0
    """Times that a request gave up its place in it for another, since the start."""
    prompt_tokens: int = 0
    """Tokens of prompts that were read since the start."""
    found_tokens: int = 0
    """Those of them that were in the KV cache already."""
    generated_tokens: int = 0
    """Tokens generated since the start."""
    steps: int = 0
    """Forward passes since the start."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine needs to know to start; the same for every rank of a replica."""

    model_path: str
    tensor: int = 1
    pipeline: int = 1
    """Pipeline stages, each of `tensor` ranks."""
    precision: Literal["fp32", "bf16"] = "fp32"
    max_batch: int = 32
    """Requests that run at once."""
    max_waiting: int = 128
    """Requests that may wait beside those; more raise QueueFullError."""
    context_length: int | None = None
    """Most tokens of prompt and answer together; None takes the model's max_position_embeddings."""
    batched_tokens: int | None = None
    """Most tokens of one step; a longer prompt is read in several, beside the others' answers. None: the
    engine's own choice, here and below."""
    prefill_ms: float | None = None
    """Milliseconds that the prompts of one step may take beside running answers; infinity: any number."""
    kv_cache_bytes: int | None = None
    """Memory of a rank's KV cache."""
    block_size: int | None = None
    """Tokens of one block of the KV cache, the least that two requests share."""
    prefix_caching: bool = True
    """Whether a prompt that begins like an earlier one takes over what was computed for that."""
    device: Literal["cpu", "cuda"] | None = None
    """Where the ranks compute: on GPUs only where the app's lease has some. None: on a GPU that this process
    sees, if any, for who uses an engine by itself."""
    reasoning: str | None = None
    """The parser of the model's reasoning, behind which structures hold; for an engine with such parsers."""
    threads: int = 1
    """torch threads a rank."""
    parks: bool = False
    """It may be parked; for an engine that has to know that when it starts."""
    extra: dict[str, Any] = field(default_factory=dict)


class EngineError(Exception):
    """The engine is broken (a rank died, a forward pass failed); its replica must be replaced."""


class QueueFullError(Exception):
    """As many requests wait as may wait; try again later."""


class PromptError(ValueError):
    """The request cannot be run by this model (too long, empty); the message says why.

    `field` is what is wrong: `prompt`, or a field of SamplingParams.
    """

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


class AnswerError(Exception):
    """One answer cannot go on; the engine can, and all its other answers do.

    Args:
        own_fault: what the request asks for is why, else the model or the engine.
    """

    def __init__(self, message: str, *, own_fault: bool) -> None:
        super().__init__(message)
        self.own_fault = own_fault


class UnsupportedError(Exception):
    """This engine, or the model in it, does not do what was asked; the message says so to the user."""


class WeightsError(Exception):
    """The other weights cannot be loaded; the engine goes on with those that it has."""


class EngineReader(Reader, Protocol):
    """Reads one answer, see `Reader`."""

    @property
    def shows_special_tokens(self) -> bool:
        """It looks for special tokens in the text."""

    @property
    def takes_structures(self) -> bool:
        """An answer that is held to a structure can be read."""

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends the reasoning that the answer begins with; None: it begins with none."""


class EngineChat(Protocol):
    """How an engine renders conversations, and reads answers."""

    async def render(self, messages: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation; `asked` is what the request says of its template and its length.

        Raises:
            PromptError: it cannot be rendered.
        """

    def reader(self, asked: Mapping[str, Any], prompt_ids: Sequence[int]) -> EngineReader | None:
        """What reads one answer; None where all of it is words.

        Raises:
            UnsupportedError: nothing here reads the calls that the request leaves to the model.
        """


class Engine(Protocol):
    """What a replica needs of an engine. All methods are called from one event loop."""

    context_length: int

    async def start(self) -> None:
        """Load the model on all ranks; return when requests can be taken."""

    def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        """Run one request; closing or cancelling the iterator aborts it.

        Args:
            priority: lower goes first, and takes the place of higher where there is none left.
            cache_salt: of what was computed for earlier requests, only that of those with the same one is
                taken over.

        Raises:
            PromptError: the prompt is empty, or too long for the model with the answer asked for.
            QueueFullError: as many requests wait as may wait.
            UnsupportedError: the engine does not know what the sampling asks for.
            AnswerError: no token can follow; after some that did, it may be.
            EngineError: the engine broke while the request was in it.
        """

    async def embed(self, request_id: str, prompt_ids: Sequence[int]) -> list[float]:
        """The mean of the prompt's last hidden states, [hidden size]; raises what `generate` raises."""

    async def abort(self, request_id: str) -> None:
        """End a request now and free its place; nothing happens when it is not there."""

    async def load_weights(self, model_path: str) -> None:
        """Go on with the weights of another version of the model.

        Answers that have begun are finished first; requests that have no token yet wait, and are answered by
        the new weights.

        Raises:
            WeightsError: they cannot be loaded, or are another model's; the old ones stay.
            EngineError: nor are the old ones there any more; the engine is of no use.
        """

    async def park(self) -> bool:
        """Give the devices and the KV cache back, and keep the weights in host memory; nothing is in it.
        False: this engine does not do that here, and goes on.

        Raises:
            EngineError: it broke over it.
        """

    async def wake(self) -> None:
        """Go on after `park`, on the devices that it had; the weights are looked at bit by bit.

        Raises:
            EngineError: they are not what they were, or there is no room: the engine is of no use any more.
        """

    def chat(self, tools: str | None, reasoning: str | None) -> EngineChat | None:
        """The engine's own ways with conversations; None: it leaves them to the replica.

        Args:
            tools, reasoning: names of parsers; None for no parser.

        Raises:
            UnsupportedError: it knows no such parser, or not for this model.
        """

    def statistics(self) -> Statistics: ...

    def check(self) -> None:
        """Raise EngineError when the engine cannot go on."""

    async def stop(self) -> None:
        """End all requests and free the model."""
