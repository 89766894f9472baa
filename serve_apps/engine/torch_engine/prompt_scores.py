"""Log-probabilities of a prompt's own tokens, noted as the prompt is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import torch

from serve_apps.engine.protocol import AnswerError, TokenLogprob


class PromptScores:
    """Those of one prompt; of its first token there is none.

    Args:
        num_top: alternatives that are noted with each token.
    """

    def __init__(self, prompt_ids: Sequence[int], num_top: int) -> None:
        self.prompt_ids = prompt_ids
        self.num_top = num_top
        self._noted: list[TokenLogprob | None] = [None] * (len(prompt_ids) - 1)

    def note(self, position: int, entry: TokenLogprob) -> None:
        """Note what the token at a position says of the next; a prompt that lost its place says it again."""
        self._noted[position] = entry

    def take(self) -> tuple[TokenLogprob, ...]:
        """All of them, once the prompt was read; they are forgotten here.

        Raises:
            AnswerError: the model's numbers are none.
        """
        noted, self._noted = self._noted, []
        entries = tuple(entry for entry in noted if entry is not None)
        assert len(entries) == len(noted)
        if any(isnan(entry.logprob) for entry in entries):
            raise AnswerError("the model's logits are not finite", own_fault=False)
        return entries


@dataclass(frozen=True)
class ScoredToken:
    """A place in the batch whose hidden state says how likely the prompt's next token was."""

    row: int
    """Of the step."""
    position: int
    """In the prompt."""


def note_scores(
    logits: torch.Tensor, places: Sequence[ScoredToken], scores: Sequence[PromptScores | None]
) -> None:
    """Note what the logits of some places say, [places, vocabulary].

    Args:
        scores: of each place, where it belongs; None: its request is gone.
    """
    kept = [number for number, one in enumerate(scores) if one is not None]
    if not kept:
        return
    takers = [one for one in scores if one is not None]
    places = [places[number] for number in kept]
    targets = [one.prompt_ids[place.position + 1] for one, place in zip(takers, places, strict=True)]
    chosen = logits if len(kept) == len(scores) else logits[kept]
    logprobs = chosen.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, torch.tensor(targets, device=logits.device)[:, None])
    ranks = (logprobs >= own).sum(dim=-1).tolist()
    most = min(max(one.num_top for one in takers), logits.shape[-1])
    values, ids = (side.tolist() for side in logprobs.topk(most, dim=-1))
    for number, (one, place) in enumerate(zip(takers, places, strict=True)):
        top = tuple(zip(ids[number][: one.num_top], values[number][: one.num_top], strict=True))
        one.note(place.position, TokenLogprob(targets[number], own[number].item(), top, ranks[number]))
