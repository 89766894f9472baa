"""From what the choices of a request gain to the answers that OpenAI's clients read."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_apps.openai.answers import (
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    Usage,
)
from serve_apps.parsing.answer_parser import CallPiece
from serve_apps.tokens.inbox import Item

Logprob = tuple[str, bytes, float, Sequence[tuple[str, bytes, int, float]]]
"""(token, its bytes, natural-log probability, alternatives as (token, its bytes, id, log-probability))"""
REPLACEMENT = "\ufffd"
LEAST_LOGPROB = -9999.0
"""In place of what JSON has no number for, as OpenAI and vLLM do."""


@dataclass(frozen=True)
class ChoiceEvent:
    """What one choice gained; `restarted` says that what came before counts no more."""

    index: int
    item: Item
    restarted: bool = False


class Gathered:
    """The choices of an answer as far as they have come."""

    def __init__(self, num_choices: int) -> None:
        self.text = [""] * num_choices
        self.reasoning = [""] * num_choices
        self.reasoning_tokens = [0] * num_choices
        self.calls: list[list[CallPiece]] = [[] for _ in range(num_choices)]
        self.logprobs: list[list[Logprob]] = [[] for _ in range(num_choices)]
        self.tokens = [0] * num_choices
        self.finish_reason: list[str | None] = [None] * num_choices

    def add(self, event: ChoiceEvent) -> None:
        index, item = event.index, event.item
        if event.restarted:
            self.text[index], self.logprobs[index], self.tokens[index] = "", [], 0
            self.reasoning[index], self.reasoning_tokens[index], self.calls[index] = "", 0, []
        self.text[index] += item["text"]
        self.reasoning[index] += item.get("reasoning", "")
        self.calls[index].extend(item.get("calls", ()))
        self.logprobs[index].extend(item.get("logprobs", ()))
        self.count(event)
        self.finish_reason[index] = item.get("finish_reason")

    def count(self, event: ChoiceEvent) -> None:
        """Count an event's tokens, without keeping what it says."""
        self.tokens[event.index] += len(event.item["token_ids"])
        self.reasoning_tokens[event.index] += event.item.get("reasoning_tokens", 0)


def usage(prompt_tokens: Iterable[int], gathered: Gathered) -> Usage:
    """What an answer took."""
    prompt, completion = sum(prompt_tokens), sum(gathered.tokens)
    used: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if any(gathered.reasoning_tokens):
        used["completion_tokens_details"] = {"reasoning_tokens": sum(gathered.reasoning_tokens)}
    return used


@dataclass(frozen=True)
class Heading:
    """What all parts of an answer begin with, and what it was asked to carry."""

    id: str
    """Without what says which endpoint it is of."""
    created: int
    """Seconds since 1970."""
    model: str
    num_choices: int
    with_logprobs: bool
    with_usage: bool
    """Whether a stream ends with the tokens that it took."""


class CompletionFormat:
    """Answers of /v1/completions."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._id = f"cmpl-{heading.id}"
        # Where each choice's next token begins in its text, for `text_offset`; one may be half a character.
        self._offset = [0] * heading.num_choices
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._offset]

    def answer(self, gathered: Gathered, used: Usage) -> CompletionAnswer:
        """The whole answer."""
        parts = zip(gathered.text, gathered.logprobs, gathered.finish_reason, strict=True)
        choices = [self._choice(index, *part) for index, part in enumerate(parts)]
        heading = self._heading
        return {
            "id": self._id,
            "object": "text_completion",
            "created": heading.created,
            "model": heading.model,
            "choices": choices,
            "usage": used,
        }

    def chunks(self, event: ChoiceEvent) -> list[CompletionChunk]:
        """The parts of a stream that tell of one event."""
        item = event.item
        choice = self._choice(event.index, item["text"], item.get("logprobs", ()), item.get("finish_reason"))
        return [self._chunk([choice])]

    def last_chunk(self, used: Usage) -> CompletionChunk:
        """The part of a stream that says what it took."""
        return {**self._chunk([]), "usage": used}

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionChunk:
        heading = self._heading
        chunk: CompletionChunk = {
            "id": self._id,
            "object": "text_completion",
            "created": heading.created,
            "model": heading.model,
            "choices": choices,
        }
        if heading.with_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self, index: int, text: str, logprobs: Sequence[Logprob], finish_reason: str | None
    ) -> CompletionChoice:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, logprobs) if self._heading.with_logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[Logprob]) -> CompletionLogprobs:
        offsets = []
        for _, piece, _, _ in logprobs:
            offsets.append(self._offset[index])
            self._offset[index] += len(self._decoders[index].decode(piece))
        return {
            "tokens": [_name(token, piece) for token, piece, _, _ in logprobs],
            "token_logprobs": [number(value) for _, _, value, _ in logprobs],
            "top_logprobs": [_by_name(entry) for entry in logprobs],
            "text_offset": offsets,
        }


def number(logprob: float) -> float:
    """A log-probability as JSON has it."""
    return max(logprob, LEAST_LOGPROB)


def _name(token: str, piece: bytes) -> str:
    """A token's text, or its bytes as OpenAI writes them where they are no text alone."""
    if REPLACEMENT not in token or token.encode() == piece:
        return token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _by_name(entry: Logprob) -> dict[str, float]:
    """The chosen token and its alternatives; two of one text are kept apart by their ids."""
    token, piece, value, top = entry
    found: dict[str, float] = {}
    for other, its_piece, token_id, logprob in top:
        name = _name(other, its_piece)
        found[f"token_id:{token_id}" if name in found else name] = number(logprob)
    found.setdefault(_name(token, piece), number(value))
    return found
