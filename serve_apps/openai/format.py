"""From what the choices of a request gain to the answers that OpenAI's clients read."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from serve_apps.openai.answers import (
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    ErrorAnswer,
    PromptLogprob,
    PromptLogprobs,
    Usage,
)
from serve_apps.openai.errors import ApiError
from serve_apps.parsing.answer_parser import CallPiece
from serve_apps.tokens.inbox import Item

Logprob = tuple[str, bytes, float, Sequence[tuple[str, bytes, int, float]]]
"""(token, its bytes, natural-log probability, alternatives as (token, its bytes, id, log-probability))"""
ToldPrompt = dict[str, Any]
"""What the first item tells of a prompt, as far as it was asked for: `text`, `token_ids`, and `logprobs`, as
those of answers, each with its token's id and rank behind; the first token has None as its probability."""
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
        self.token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.prompt: list[ToldPrompt] = [{} for _ in range(num_choices)]
        self.finish_reason: list[str | None] = [None] * num_choices
        self._stop_string: list[str | None] = [None] * num_choices
        self._lead_tokens = [0] * num_choices
        self._call_tokens = [0] * num_choices
        self._text_after_calls = [0] * num_choices

    def add(self, event: ChoiceEvent) -> None:
        index, item = event.index, event.item
        if event.restarted:
            self.text[index], self.logprobs[index], self.tokens[index] = "", [], 0
            self.token_ids[index], self.prompt[index] = [], {}
            self.reasoning[index], self.reasoning_tokens[index], self.calls[index] = "", 0, []
            self._lead_tokens[index], self._call_tokens[index] = 0, 0
            self._text_after_calls[index] = 0
        self.prompt[index] = item.get("prompt", self.prompt[index])
        self.token_ids[index].extend(item["token_ids"])
        self.text[index] += item["text"]
        self.reasoning[index] += item.get("reasoning", "")
        self.calls[index].extend(item.get("calls", ()))
        self.logprobs[index].extend(item.get("logprobs", ()))
        self.count(event)
        self._lead_tokens[index] += item.get("lead_tokens", 0)
        self._call_tokens[index] += item.get("call_tokens", 0)
        self._text_after_calls[index] += item.get("text_after_calls", 0)
        self.finish_reason[index] = item.get("finish_reason")
        self._stop_string[index] = item.get("stop_string")

    def event(self, index: int) -> ChoiceEvent:
        """A whole choice, as if all of it had come at once."""
        item = {
            "text": self.text[index],
            "reasoning": self.reasoning[index],
            "calls": self.calls[index],
            "logprobs": self.logprobs[index],
            "lead_tokens": self._lead_tokens[index],
            "call_tokens": self._call_tokens[index],
            "text_after_calls": self._text_after_calls[index],
            "finish_reason": self.finish_reason[index],
            "stop_string": self._stop_string[index],
        }
        return ChoiceEvent(index, item)

    def count(self, event: ChoiceEvent) -> None:
        """Count an event's tokens, without keeping what it says."""
        item = event.item
        self.tokens[event.index] += len(item["token_ids"])
        if "reasoning_tokens" in item:
            self.reasoning_tokens[event.index] += item["reasoning_tokens"]


def usage(prompt_tokens: Iterable[int], gathered: Gathered, cached_tokens: int | None = None) -> Usage:
    """What an answer took.

    Args:
        cached_tokens: of the prompts', those that were in the cache; None: that is not known.
    """
    prompt, completion = sum(prompt_tokens), sum(gathered.tokens)
    used: Usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached_tokens is not None:
        used["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if any(gathered.reasoning_tokens):
        used["completion_tokens_details"] = {"reasoning_tokens": sum(gathered.reasoning_tokens)}
    return used


def cached_tokens(used: Usage) -> int:
    """Of the prompt's tokens, those that were in the KV cache already, where that is known."""
    details: Mapping[str, int] = used.get("prompt_tokens_details") or {}  # type: ignore[assignment]
    return details.get("cached_tokens", 0)


def reasoning_tokens(used: Usage) -> int:
    """Of the answer's tokens, those of the reasoning."""
    return used["completion_tokens_details"]["reasoning_tokens"] if "completion_tokens_details" in used else 0


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
    echo: bool = False
    """Whether answers begin with their prompts."""
    prompts: Sequence[str | None] = ()
    """Of each choice the prompt's text to echo, where the client sent it; else a replica says it."""
    with_prompt_logprobs: bool = False
    with_token_ids: bool = False
    with_special_tokens: bool = False
    """Whether special tokens are part of the text."""


class Format(Protocol):
    """Makes the answer to one request, whole or as a stream: the words of one API."""

    NAMED_EVENTS: ClassVar[bool]
    """Whether the events of a stream are named by their `type`; else its last one is [DONE]."""

    def answer(self, gathered: Gathered, used: Usage) -> Mapping[str, object]:
        """The whole answer."""

    def opening(self, used: Usage) -> Sequence[Mapping[str, object]]:
        """With what a stream begins.

        Args:
            used: what is known by then: the prompt's tokens.
        """

    def chunks(self, event: ChoiceEvent) -> Sequence[Mapping[str, object]]:
        """The parts of a stream that tell of one event."""

    def ending(self, used: Usage) -> Sequence[Mapping[str, object]]:
        """With what a stream ends whose choices are complete."""

    def failure(self, error: ApiError) -> Mapping[str, object]:
        """The last part of a stream that breaks off."""


class OpenAIFormat:
    """What the streams of OpenAI's older endpoints share."""

    NAMED_EVENTS: ClassVar[bool] = False

    def opening(self, used: Usage) -> list[Mapping[str, object]]:
        """See Format."""
        return []

    def failure(self, error: ApiError) -> ErrorAnswer:
        """See Format."""
        return error.body()


class CompletionFormat(OpenAIFormat):
    """Answers of /v1/completions."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._id = f"cmpl-{heading.id}"
        # Where each choice's next token begins in its text, for `text_offset`; one may be half a character.
        self._offset = [0] * heading.num_choices
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._offset]

    def answer(self, gathered: Gathered, used: Usage) -> CompletionAnswer:
        """The whole answer."""
        parts = zip(
            gathered.text,
            gathered.logprobs,
            gathered.finish_reason,
            gathered.prompt,
            gathered.token_ids,
            strict=True,
        )
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
        choice = self._choice(
            event.index,
            item["text"],
            item.get("logprobs", ()),
            item.get("finish_reason"),
            item.get("prompt", {}),
            item["token_ids"],
        )
        return [self._chunk([choice])]

    def ending(self, used: Usage) -> list[CompletionChunk]:
        """The part of a stream that says what it took, where that was asked for."""
        return [{**self._chunk([]), "usage": used}] if self._heading.with_usage else []

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
        self,
        index: int,
        text: str,
        logprobs: Sequence[Logprob],
        finish_reason: str | None,
        prompt: ToldPrompt,
        token_ids: Sequence[int],
    ) -> CompletionChoice:
        """A choice, or what it gained; what `prompt` tells is there with the first of it."""
        heading = self._heading
        offsets: list[int] = []
        scores: Sequence[Any] = prompt.get("logprobs", ()) if heading.echo else ()
        if heading.echo and prompt:
            own = heading.prompts[index]
            echoed = prompt["text"] if own is None else own
            text = echoed + text
            if heading.with_logprobs:
                offsets = self._prompt_offsets(index, scores, echoed)
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, scores, logprobs, offsets) if heading.with_logprobs else None,
            "finish_reason": finish_reason,
        }
        if heading.with_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(prompt)
        if heading.with_token_ids:
            choice["token_ids"] = list(token_ids)
            if prompt:
                choice["prompt_token_ids"] = list(prompt["token_ids"])
        return choice

    def _prompt_offsets(self, index: int, scores: Sequence[Any], echoed: str) -> list[int]:
        """Where each token of a prompt begins in its text; special tokens may be in it, or not."""
        offsets, at = [], 0
        for token, piece, *_ in scores:
            offsets.append(at)
            if piece:
                at += len(self._decoders[index].decode(piece))
            elif echoed.startswith(token, at):
                at += len(token)
        self._decoders[index].reset()
        self._offset[index] = len(echoed)
        return offsets

    def _logprobs(
        self, index: int, scores: Sequence[Any], logprobs: Sequence[Logprob], offsets: list[int]
    ) -> CompletionLogprobs:
        for token, piece, _, _ in logprobs:
            offsets.append(self._offset[index])
            special = not piece and self._heading.with_special_tokens
            self._offset[index] += len(token if special else self._decoders[index].decode(piece))
        entries: list[Any] = [*(score[:4] for score in scores), *logprobs]
        return {
            "tokens": [_name(token, piece) for token, piece, _, _ in entries],
            "token_logprobs": [None if value is None else number(value) for _, _, value, _ in entries],
            "top_logprobs": [None if entry[2] is None else _by_name(entry) for entry in entries],
            "text_offset": offsets,
        }


def prompt_logprobs(prompt: ToldPrompt) -> PromptLogprobs:
    """What a model says of a prompt's tokens, by their ids, as vLLM writes it; a token itself comes first."""
    answer: PromptLogprobs = []
    for token, piece, value, top, token_id, rank in prompt["logprobs"]:
        if value is None:
            answer.append(None)
            continue
        found: dict[str, PromptLogprob] = {str(token_id): _prompt_logprob(value, rank, token, piece)}
        for place, (other, its_piece, its_id, logprob) in enumerate(top, 1):
            found.setdefault(str(its_id), _prompt_logprob(logprob, place, other, its_piece))
        answer.append(found)
    return answer


def _prompt_logprob(value: float, rank: int, token: str, piece: bytes) -> PromptLogprob:
    return {"logprob": number(value), "rank": rank, "decoded_token": _name(token, piece)}


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
