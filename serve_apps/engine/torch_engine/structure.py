"""Answers that keep to a structure: which tokens may come next (llguidance)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from serve_apps.engine.protocol import AnswerError, PromptError, SamplingParams, UnsupportedError
from serve_apps.engine.structures import NAMES, compiled
from serve_apps.engine.token_pieces import vocabulary_of


class Structures:
    """Makes the grammars of one model's answers.

    Args:
        tokenizer: the model's, from transformers.
        vocab_size: of its logits.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)

    @cached_property
    def _vocabulary(self) -> Any:
        # About a second for a large vocabulary, which only those pay who ask for a structure.
        if not self._eos_ids:
            raise UnsupportedError("the model has no end of sequence, which a structured answer needs")
        try:
            return vocabulary_of(self._tokenizer, self._vocab_size, self._eos_ids)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"the model's tokenizer does not allow structured answers: {error}"
            ) from error

    def make(self, sampling: SamplingParams) -> Structure | LateStructure | None:
        """The structure of one answer; None where it is free.

        Raises:
            PromptError: the text is none of this kind, or holds what cannot be kept to.
            UnsupportedError: the model cannot give structured answers.
        """
        from llguidance import LLMatcher

        if sampling.structure is None:
            return None
        kind, text = sampling.structure
        matcher = LLMatcher(self._vocabulary, compiled(kind, text).grammar, log_level=0)
        if matcher.is_error():
            raise PromptError(
                f"the {NAMES[kind]} cannot be kept to: {matcher.get_error().splitlines()[0]}", kind
            )
        structure = Structure(matcher, self._vocabulary.vocab_size, NAMES[kind])
        reasoning, instead = sampling.reasoning, sampling.instead_token_ids
        if reasoning is None and not instead:
            return structure
        return LateStructure(structure, reasoning, instead, frozenset(self._eos_ids))


class Structure:
    """Where one answer stands in its grammar.

    Args:
        vocab_size: of the tokenizer, which may be longer than the model's logits.
        name: what a user calls it.
    """

    def __init__(self, matcher: Any, vocab_size: int, name: str) -> None:
        from llguidance import numpy

        self._name = name
        self._matcher = matcher
        self._bits = numpy.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: torch.Tensor) -> None:
        """Leave only the tokens that may come next, [vocabulary].

        Raises:
            AnswerError: the grammar has outgrown its bounds.
        """
        import numpy as np
        from llguidance.numpy import fill_next_token_bitmask

        with _panics_reported(self._name):
            fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            # It lets nothing but the end come then, and the answer would look as if it were complete.
            why = self._matcher.get_error().splitlines()[0]
            raise AnswerError(
                f"the answer cannot be held to its {self._name} any further: {why}", own_fault=True
            )
        allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: len(logits)]
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), float("-inf"))

    def take(self, token_id: int) -> None:
        """Note the token that came."""
        with _panics_reported(self._name):
            self._matcher.consume_token(token_id)


class LateStructure:
    """A structure that holds behind the model's reasoning, or not at all where the answer begins otherwise.

    Args:
        structure: what holds.
        reasoning: see SamplingParams.
        instead: tokens with which the answer may begin in place of the structure.
        eos_ids: tokens that end an answer, which reasoning cannot.
    """

    def __init__(
        self,
        structure: Structure,
        reasoning: tuple[int | None, int] | None,
        instead: tuple[int, ...],
        eos_ids: frozenset[int],
    ) -> None:
        self._structure = structure
        self._begin = None if reasoning is None else reasoning[0]
        self._end = None if reasoning is None else reasoning[1]
        self._instead = instead
        self._eos_ids = sorted(eos_ids)
        self._thinks = reasoning is not None and self._begin is None
        self._may_think = self._begin is not None
        self._first = True
        self._free = False

    def mask(self, logits: torch.Tensor) -> None:
        """See Structure."""
        if self._free:
            return
        if self._thinks:
            logits[self._eos_ids] = float("-inf")
            return
        others = [*self._instead, *([self._begin] if self._may_think else [])] if self._first else []
        kept = logits[others]
        self._structure.mask(logits)
        logits[others] = kept

    def take(self, token_id: int) -> None:
        """See Structure."""
        if self._free:
            return
        if self._thinks:
            self._thinks = token_id != self._end
        elif self._first and self._may_think and token_id == self._begin:
            self._thinks, self._may_think = True, False
        elif self._first and token_id in self._instead:
            self._free = True
        else:
            self._first = False
            self._structure.take(token_id)


@contextmanager
def _panics_reported(name: str) -> Iterator[None]:
    """A mistake in the library ends the answer, not the thread of all answers.

    Raises:
        AnswerError
    """
    try:
        yield
    except BaseException as error:
        # What Rust code panics with is no Exception, and no module has its class.
        if type(error).__name__ != "PanicException":
            raise
        raise AnswerError(f"the answer cannot be held to its {name}: {error}", own_fault=True) from error
