"""What a gateway is told of an answer: each gain as an item, the first with what was asked of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_apps.engine.protocol import Delta, TokenLogprob
from serve_apps.replica.prompts import Prompts


class ItemMaker:
    """One answer, as its request wants it told.

    Args:
        request: see `Replica.generate`.
        prompt_ids: its prompt, as it is read.
        whole: whether that is all of the prompt.
    """

    def __init__(
        self, prompts: Prompts, request: Mapping[str, Any], prompt_ids: Sequence[int], *, whole: bool
    ) -> None:
        self._prompts = prompts
        self._request = request
        self._prompt_ids = prompt_ids
        self._whole = whole
        self._first = True

    def item(self, delta: Delta) -> dict[str, Any]:
        """One gain, see `tokens.inbox.Item`."""
        item: dict[str, Any] = {"text": delta.text, "token_ids": delta.token_ids}
        if delta.logprobs:
            item["logprobs"] = [self._entry(entry) for entry in delta.logprobs]
        if delta.finish_reason is not None:
            item["finish_reason"] = delta.finish_reason
        if delta.stop_string is not None:
            item["stop_string"] = delta.stop_string
        if delta.cached_tokens is not None:
            item["cached_tokens"] = delta.cached_tokens
        if self._first:
            self._first = False
            if prompt := self._prompt(delta):
                item["prompt"] = prompt
        return item

    def _prompt(self, delta: Delta) -> dict[str, Any]:
        request, ids = self._request, self._prompt_ids
        told: dict[str, Any] = {}
        if request.get("echo"):
            given = request.get("prompt")
            told["text"] = given if self._whole and isinstance(given, str) else self._prompts.decode(ids)
        if request.get("token_ids"):
            told["token_ids"] = list(ids)
        if request["sampling"].get("prompt_logprobs") is not None:
            scores = [(*self._entry(entry), entry.token_id, entry.rank) for entry in delta.prompt_logprobs]
            told["logprobs"] = [(*self._piece(ids[0]), None, [], ids[0], None), *scores]
        return told

    def _entry(self, entry: TokenLogprob) -> tuple[str, bytes, float, list[tuple[str, bytes, int, float]]]:
        top = [(*self._piece(token_id), token_id, logprob) for token_id, logprob in entry.top]
        return *self._piece(entry.token_id), entry.logprob, top

    def _piece(self, token_id: int) -> tuple[str, bytes]:
        name, piece = self._prompts.piece(token_id)
        return f"token_id:{token_id}" if self._request.get("names_are_ids") else name, piece
