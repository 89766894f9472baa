"""The next token of every row, chosen from the logits as each request asks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from serve_apps.engine.protocol import AnswerError, SamplingParams
from serve_apps.engine.torch_engine.structure import LateStructure, Structure

logger = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them overflows and changes nothing."""

_NO_TOKEN = -1
"""In place of a token where a row has none that could be chosen."""

_CANDIDATES = 256
"""How many of the likeliest tokens are sorted at first; all are only where these do not cover top_p."""


@dataclass(eq=False)
class Sampler:
    """How one request chooses, with its own source of chance, so that no other request changes its tokens."""

    params: SamplingParams
    prompt_ids: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    bad_words: Sequence[Sequence[int]] = ()
    """The tokens of words that may not come; the last of one is forbidden after all others."""
    structure: Structure | LateStructure | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    chosen: Counter[int] = field(default_factory=Counter)
    """The answer's tokens, each with how often it came."""
    said: list[int] = field(default_factory=list)
    """The answer's tokens in their order, where it has bad words."""

    def __post_init__(self) -> None:
        self._allowed = torch.tensor(self.params.allowed_token_ids, dtype=torch.long)
        if self.params.seed is None:
            self.generator.seed()
        else:
            # The generator takes 64 bits; requests may name any integer.
            self.generator.manual_seed(self.params.seed % 2**63)

    @property
    def greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @property
    def adjusts(self) -> bool:
        """Whether it changes logits before a token is chosen."""
        params = self.params
        return bool(
            self.structure is not None
            or params.allowed_token_ids
            or self.bad_words
            or params.logit_bias
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or params.min_tokens > self.chosen.total()
        )

    def take(self, token_id: int) -> None:
        """Note a token of the answer."""
        self.chosen[token_id] += 1
        if self.bad_words:
            self.said.append(token_id)
        if self.structure is not None:
            self.structure.take(token_id)

    def adjust(self, logits: torch.Tensor) -> None:
        """Change the logits of the next token in place, [vocabulary]; in vLLM's order."""
        params = self.params
        if self.structure is not None:
            self.structure.mask(logits)
        if params.allowed_token_ids:
            kept = logits[self._allowed]
            logits.fill_(float("-inf"))
            logits[self._allowed] = kept
        if self.bad_words:
            self._forbid_bad_words(logits)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            logits[list(ids)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        if params.min_tokens > self.chosen.total():
            self._forbid_the_end(logits)
        if params.repetition_penalty != 1.0:
            seen = list(self.chosen.keys() | set(self.prompt_ids))
            values = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self.chosen and (params.frequency_penalty or params.presence_penalty):
            counts = torch.tensor(list(self.chosen.values()), dtype=logits.dtype, device=logits.device)
            logits[list(self.chosen)] -= params.frequency_penalty * counts + params.presence_penalty

    def _forbid_bad_words(self, logits: torch.Tensor) -> None:
        for word in self.bad_words:
            before = len(word) - 1
            if not before or self.said[-before:] == word[:-1]:
                logits[word[-1]] = float("-inf")

    def _forbid_the_end(self, logits: torch.Tensor) -> None:
        ends = list(self.end_ids)
        kept = logits[ends]
        logits[ends] = float("-inf")
        if logits.max() == float("-inf"):
            logits[ends] = kept  # a structure that is complete lets nothing else come

    def draw(self) -> float:
        """The next random number in [0, 1) of this request."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities under the model itself, before temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), likeliest first."""


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int | AnswerError]:
    """Choose one token a row, or say why there is none: what is wrong with a row ends its own answer only.

    Args:
        logits: [rows, vocabulary]
        samplers: one a row.
    """
    errors: dict[int, AnswerError] = {}
    adjusted = logits
    if adjusting := [row for row, sampler in enumerate(samplers) if sampler.adjusts]:
        # A copy: log probabilities are those of the model itself.
        adjusted = logits.to(torch.float32, copy=True)
        for row in adjusting:
            try:
                samplers[row].adjust(adjusted[row])
            except AnswerError as error:
                errors[row] = error
            except Exception as error:
                logger.exception("a token could not be chosen")
                errors[row] = AnswerError(f"no token could be chosen: {error!r}", own_fault=False)
    chosen = _choose(adjusted, samplers)
    for row, token in enumerate(chosen):
        if token == _NO_TOKEN and row not in errors:
            errors[row] = _without_token(logits[row])
    return [errors.get(row, token) for row, token in enumerate(chosen)]


def _without_token(logits: torch.Tensor) -> AnswerError:
    """Why no token could be chosen, by what the model itself says, [vocabulary]."""
    if not bool(logits.max().isfinite()):
        return AnswerError("the model's logits are not finite", own_fault=False)
    return AnswerError(
        "what the request asks for (a structure, allowed tokens, bad words, biases, penalties, a least number"
        " of tokens) leaves no token that may come next",
        own_fault=True,
    )


def _choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """A token of each row, or _NO_TOKEN where its logits are no numbers that one could be chosen by."""
    if all(sampler.greedy for sampler in samplers):
        return _likeliest(logits).tolist()
    chosen = torch.empty(len(samplers), dtype=torch.long)
    # Apart, because the two draw from differently ordered tokens, and a request's tokens must not depend on
    # what else is in the batch.
    greedy = [row for row, sampler in enumerate(samplers) if sampler.greedy]
    plain = [row for row, sampler in enumerate(samplers) if not sampler.greedy and not sampler.filtered]
    filtered = [row for row, sampler in enumerate(samplers) if not sampler.greedy and sampler.filtered]
    if greedy:
        chosen[greedy] = _likeliest(logits[greedy]).cpu()
    if plain:
        chosen[plain] = _sample_plain(logits[plain], [samplers[row] for row in plain]).cpu()
    if filtered:
        chosen[filtered] = _sample_filtered(logits[filtered], [samplers[row] for row in filtered]).cpu()
    return chosen.tolist()


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[Logprobs]:
    """The log probability of each row's token and of its likeliest alternatives.

    Args:
        logits: [rows, vocabulary]
        token_ids: the chosen token of each row.
        num_top: how many alternatives each row reports.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    rows = torch.arange(len(token_ids), device=logits.device)
    chosen = logprobs[rows, torch.tensor(token_ids, device=logits.device)].tolist()
    most = min(max(num_top), logits.shape[-1])
    values, ids = logprobs.topk(most, dim=-1)
    result = []
    for own, count, row_ids, row_values in zip(chosen, num_top, ids.tolist(), values.tolist(), strict=True):
        result.append(Logprobs(own, tuple(zip(row_ids[:count], row_values[:count], strict=True))))
    return result


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)[:, None]


def _scaled(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    return logits.float() / _column([sampler.params.temperature for sampler in samplers], logits)


def _sample_plain(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """From all tokens."""
    return _invert(_scaled(logits, samplers).softmax(dim=-1), samplers)


def _sample_filtered(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """From the `top_k` likeliest tokens, and of those from the fewest that hold `top_p`."""
    vocab_size = logits.shape[-1]
    scaled = _scaled(logits, samplers)
    top_k = _column([min(sampler.params.top_k or vocab_size, vocab_size) for sampler in samplers], logits)
    top_p = _column([sampler.params.top_p for sampler in samplers], logits)
    limits = [sampler.params.top_k for sampler in samplers]
    for num_candidates in (min(vocab_size, max(_CANDIDATES, *limits)), vocab_size):
        values, ids = scaled.topk(num_candidates, dim=-1)
        beyond = torch.arange(num_candidates, device=logits.device) >= top_k
        # Relative to all that a row may choose from: everything, or its top_k.
        total = torch.where(
            top_k < vocab_size,
            values.masked_fill(beyond, float("-inf")).logsumexp(dim=-1, keepdim=True),
            scaled.logsumexp(dim=-1, keepdim=True),
        )
        probabilities = (values - total).exp().masked_fill(beyond, 0.0)
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        if bool(((top_k < num_candidates) | (cumulative[:, -1:] >= top_p)).all()):
            break
    # A token stays when those before it hold less than top_p; the first always stays.
    outside = cumulative - probabilities >= top_p
    min_p = _column([sampler.params.min_p for sampler in samplers], logits)
    outside |= probabilities < min_p * probabilities[:, :1]
    outside[:, 0] = False
    chosen = _invert(probabilities.masked_fill(outside, 0.0), samplers)
    tokens = ids.gather(-1, chosen.clamp(min=0)[:, None])[:, 0]
    return tokens.where(chosen != _NO_TOKEN, _NO_TOKEN)


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    values, ids = logits.max(dim=-1)
    return ids.where(values.isfinite(), _NO_TOKEN)


def _invert(weights: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Draw an index of each row in proportion to its weights, by the inverse of their cumulative sum."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    draws = torch.tensor([sampler.draw() for sampler in samplers], dtype=torch.float64, device=weights.device)
    # Rounding must not carry the target to the total itself, beyond the last index that has any weight.
    target = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Of a row without a finite logit, and of one with a NaN or an infinity in it, the sum is no number.
    return index.where(total[:, 0].isfinite() & (total[:, 0] > 0), _NO_TOKEN)
