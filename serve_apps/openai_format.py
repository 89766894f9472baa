"""From the events of a run to the documents that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve_apps.choices import Event

Logprob = tuple[str, float, Sequence[tuple[str, int, float]]]
"""(token, natural-log probability, alternatives as (token, id, log-probability))"""


class Gathered:
    """The choices of an answer as far as they have come."""

    def __init__(self, num_choices: int) -> None:
        self.text = [""] * num_choices
        self.logprobs: list[list[Logprob]] = [[] for _ in range(num_choices)]
        self.tokens = [0] * num_choices
        self.finish_reason: list[str | None] = [None] * num_choices

    def add(self, event: Event) -> None:
        index, item = event.index, event.item
        if event.restarted:
            self.text[index], self.logprobs[index], self.tokens[index] = "", [], 0
        self.text[index] += item["text"]
        self.logprobs[index].extend(item.get("logprobs", ()))
        self.tokens[index] += len(item["token_ids"])
        self.finish_reason[index] = item.get("finish_reason")


def usage(prompt_tokens: Iterable[int], completion_tokens: int) -> dict[str, int]:
    prompt = sum(prompt_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }


class CompletionFormat:
    """Documents of /v1/completions."""

    prefix = "cmpl"
    whole = part = "text_completion"
    with_logprobs: bool

    def __init__(self, num_choices: int, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        # Where each choice's next token begins in its text, for `text_offset`.
        self._offset = [0] * num_choices

    def choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        """A whole choice."""
        return self._choice(
            index, gathered.text[index], gathered.logprobs[index], gathered.finish_reason[index]
        )

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The `choices` entries that tell of one event."""
        item = event.item
        logprobs = item.get("logprobs", ())
        return [self._choice(event.index, item["text"], logprobs, item.get("finish_reason"))]

    def opening(self, index: int) -> dict[str, Any] | None:
        """The entry that opens a choice's stream."""
        return None

    def _choice(
        self, index: int, text: str, logprobs: Sequence[Logprob], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, logprobs) if self.with_logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        offsets = []
        for token, _, _ in logprobs:
            offsets.append(self._offset[index])
            self._offset[index] += len(token)
        return {
            "tokens": [token for token, _, _ in logprobs],
            "token_logprobs": [value for _, value, _ in logprobs],
            "top_logprobs": [{t: v for t, _, v in top} for _, _, top in logprobs],
            "text_offset": offsets,
        }


class ChatFormat:
    """Documents of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, num_choices: int, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs

    def choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": gathered.text[index], "refusal": None},
            "logprobs": self._logprobs(gathered.logprobs[index]),
            "finish_reason": gathered.finish_reason[index],
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        item, index = event.item, event.index
        entries = []
        if item["text"] or item.get("logprobs"):
            logprobs = self._logprobs(item.get("logprobs", ()))
            entries.append(self._delta(index, {"content": item["text"]}, logprobs, None))
        if item.get("finish_reason") is not None:
            entries.append(self._delta(index, {}, None, item["finish_reason"]))
        return entries

    def _delta(
        self, index: int, delta: Mapping[str, Any], logprobs: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            {**_entry(token, value), "top_logprobs": [_entry(t, v) for t, _, v in top]}
            for token, value, top in logprobs
        ]
        return {"content": content, "refusal": None}


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace"))}


Format = CompletionFormat | ChatFormat
