"""What a request may ask of any engine: what is outside these bounds could end the engine, or hang it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from serve_apps.engine.protocol import REPETITION_PENALTIES, PromptError, SamplingParams
from serve_apps.engine.structure_compiler import NAMES

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value < inf, "0 or more"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (lambda value: value >= 0, "0 (every token) or more"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "logprobs": (lambda value: value is None or value >= 0, "0 or more"),
    "prompt_logprobs": (lambda value: value is None or value >= 0, "0 or more"),
    "repetition_penalty": (
        lambda value: REPETITION_PENALTIES[0] <= value <= REPETITION_PENALTIES[1],
        "between {} and {:g}".format(*REPETITION_PENALTIES),
    ),
    "presence_penalty": (lambda value: -2 <= value <= 2, "between -2 and 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "between -2 and 2"),
    "min_tokens": (lambda value: value >= 0, "0 or more"),
}
"""By field of SamplingParams: whether a value may be, and which may."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise PromptError where a field has a value that none may have, or names a token that there is not."""
    for name, (holds, rule) in _RULES.items():
        value = getattr(sampling, name)
        if not holds(value):
            raise PromptError(f"{name} is {value}; it must be {rule}", name)
    least = 1 if sampling.prompt_logprobs is None else 0
    if sampling.max_tokens < least:
        raise PromptError(f"max_tokens is {sampling.max_tokens}; it must be at least {least}", "max_tokens")
    forms = [name for name in NAMES if getattr(sampling, name) not in (None, ())]
    if len(forms) > 1:
        raise PromptError(f"an answer has one structure, not two ({' and '.join(forms)})", forms[1])
    biased = [token for token, _ in sampling.logit_bias]
    named = ("stop_token_ids", "allowed_token_ids")
    for name, tokens in (("logit_bias", biased), *((name, getattr(sampling, name)) for name in named)):
        unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise PromptError(f"there is no token id {unknown}; this model's are 0 to {vocab_size - 1}", name)


def check_prompt(prompt_ids: Sequence[int], max_tokens: int, *, context_length: int, vocab_size: int) -> None:
    """Raise PromptError where a prompt is empty, too long with its answer, or holds an unknown token.

    Args:
        max_tokens: of the answer; 0 where none is asked for.
    """
    if not prompt_ids:
        raise PromptError("the prompt is empty; it needs at least one token")
    total = len(prompt_ids) + max_tokens
    if total > context_length:
        asks = f" and asks for up to {max_tokens} more, together {total}" if max_tokens else ""
        raise PromptError(
            f"the prompt has {len(prompt_ids)} tokens{asks}; this model takes at most {context_length}"
        )
    if not (min(prompt_ids) >= 0 and max(prompt_ids) < vocab_size):
        wrong = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise PromptError(f"the prompt holds the token id {wrong}; this model's are 0 to {vocab_size - 1}")
