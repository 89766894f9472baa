"""From what the choices of a request gain to the answers that OpenAI's clients read."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_apps.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    TopLogprob,
    Usage,
)
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
        self.logprobs: list[list[Logprob]] = [[] for _ in range(num_choices)]
        self.tokens = [0] * num_choices
        self.finish_reason: list[str | None] = [None] * num_choices

    def add(self, event: ChoiceEvent) -> None:
        index, item = event.index, event.item
        if event.restarted:
            self.text[index], self.logprobs[index], self.tokens[index] = "", [], 0
        self.text[index] += item["text"]
        self.logprobs[index].extend(item.get("logprobs", ()))
        self.tokens[index] += len(item["token_ids"])
        self.finish_reason[index] = item.get("finish_reason")


def usage(prompt_tokens: Iterable[int], completion_tokens: int) -> Usage:
    prompt = sum(prompt_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }


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
            "token_logprobs": [_number(value) for _, _, value, _ in logprobs],
            "top_logprobs": [_by_name(entry) for entry in logprobs],
            "text_offset": offsets,
        }


class ChatFormat:
    """Answers of /v1/chat/completions."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._id = f"chatcmpl-{heading.id}"
        self._opened: set[int] = set()

    def answer(self, gathered: Gathered, used: Usage) -> ChatAnswer:
        """The whole answer."""
        heading = self._heading
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": heading.created,
            "model": heading.model,
            "choices": [self._choice(index, gathered) for index in range(heading.num_choices)],
            "usage": used,
        }

    def chunks(self, event: ChoiceEvent) -> list[ChatChunk]:
        """The parts of a stream that tell of one event; the first of a choice says whose turn it is."""
        item, index = event.item, event.index
        choices: list[ChatChunkChoice] = []
        if index not in self._opened:
            self._opened.add(index)
            choices.append(_delta(index, {"role": "assistant", "content": "", "refusal": None}))
        if item["text"] or item.get("logprobs"):
            logprobs = self._logprobs(item.get("logprobs", ()))
            choices.append(_delta(index, {"content": item["text"]}, logprobs))
        if item.get("finish_reason") is not None:
            choices.append(_delta(index, {}, finish_reason=item["finish_reason"]))
        return [self._chunk([choice]) for choice in choices]

    def last_chunk(self, used: Usage) -> ChatChunk:
        """The part of a stream that says what it took."""
        return {**self._chunk([]), "usage": used}

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        heading = self._heading
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": heading.created,
            "model": heading.model,
            "choices": choices,
        }
        if heading.with_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, gathered: Gathered) -> ChatChoice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": gathered.text[index], "refusal": None},
            "logprobs": self._logprobs(gathered.logprobs[index]),
            "finish_reason": gathered.finish_reason[index],
        }

    def _logprobs(self, logprobs: Sequence[Logprob]) -> ChatLogprobs | None:
        if not self._heading.with_logprobs:
            return None
        return {
            "content": [
                {**_token(token, piece, value), "top_logprobs": [_token(t, p, v) for t, p, _, v in top]}
                for token, piece, value, top in logprobs
            ],
            "refusal": None,
        }


def _delta(
    index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token(token: str, piece: bytes, value: float) -> TopLogprob:
    return {"token": token, "logprob": _number(value), "bytes": list(piece)}


def _number(logprob: float) -> float:
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
        found[f"token_id:{token_id}" if name in found else name] = _number(logprob)
    found.setdefault(_name(token, piece), _number(value))
    return found


Format = CompletionFormat | ChatFormat
