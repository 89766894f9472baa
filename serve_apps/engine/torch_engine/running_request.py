"""A request that generates, and what each step chooses for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serve_apps.engine.answer import Answer
from serve_apps.engine.protocol import AnswerError, SamplingParams
from serve_apps.engine.torch_engine.prompt_scores import PromptScores
from serve_apps.engine.torch_engine.runner import Outputs
from serve_apps.engine.torch_engine.sampling import Logprobs, Sampler, logprobs_of, sample
from serve_apps.engine.torch_engine.scheduler import StepPlan


@dataclass(eq=False)
class RunningRequest:
    """A request that generates; `hidden` is of one that asks for its prompt's mean hidden state instead."""

    sampler: Sampler
    answer: Answer | None = None
    scores: PromptScores | None = None
    """Of the prompt's tokens, until they are handed out."""
    hidden: torch.Tensor | float = 0.0


ABANDONED = Sampler(SamplingParams(temperature=0.0))
"""Chooses for rows whose request was aborted while the step ran; nobody sees what."""


def choose(
    logits: torch.Tensor, requests: Sequence[RunningRequest | None]
) -> tuple[list[int | AnswerError], dict[RunningRequest, Logprobs]]:
    """The token of every row, or why it has none, and the log probabilities of the rows that want them."""
    if not requests:
        return [], {}
    with torch.inference_mode():
        sampled = sample(logits, [ABANDONED if request is None else request.sampler for request in requests])
        wanted = {
            request: (row, token)
            for row, (request, token) in enumerate(zip(requests, sampled, strict=True))
            if request is not None and request.sampler.params.logprobs is not None and isinstance(token, int)
        }
        if not wanted:
            return sampled, {}
        rows, tokens = zip(*wanted.values(), strict=True)
        numbers = [request.sampler.params.logprobs or 0 for request in wanted]
        described = logprobs_of(logits[list(rows)], tokens, numbers)
        return sampled, dict(zip(wanted, described, strict=True))


def note_hidden(outputs: Outputs, plan: StepPlan, requests: Sequence[RunningRequest | None]) -> None:
    """Add what a step has found of the hidden states of prompts."""
    for number, hidden in outputs.hidden.items():
        request = requests[number]
        if request is not None:
            # A prompt that gave up its place is read again from its beginning.
            before = 0.0 if plan.step.rows[number].start == 0 else request.hidden
            request.hidden = hidden.cpu() + before
