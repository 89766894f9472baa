"""A replica whose model writes what a test says, read as a replica reads it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from serve_apps.engine.protocol import Delta, FinishReason, TokenLogprob
from serve_apps.gateway.options import GatewayOptions
from serve_apps.openai.errors import ApiError
from serve_apps.replica.item_maker import ItemMaker
from serve_apps.replica.items import items
from serve_apps.replica.reading import AnswerReading
from serve_apps.tokens.inbox import Item
from tests.serve_apps.stub_gateway import StubBackend, StubGateway

HERMES = "{{ tools }}<tool_call>name arguments</tool_call>"
QWEN3 = HERMES + "{{ enable_thinking }}<think></think>"
PLAIN = "{{ messages }}"


class WritingBackend(StubBackend):
    """A replica whose model writes `text` in tokens of any size, some without text.

    Args:
        template: the model's chat template, which says how its answers are read.
        named: `tools` and `reasoning` of the app's config.
    """

    def __init__(self, template: str, **named: str) -> None:
        super().__init__()
        self.reading = AnswerReading(template, named.get("tools"), named.get("reasoning"))
        self.prompt_end = "<|im_start|>assistant\n"
        self.text = ""
        self.ends: FinishReason = "stop"
        self.stop_string: str | None = None
        self.fails: ApiError | None = None
        """With this, in place of its last token."""
        self.written = ""
        self.chance = random.Random(1)

    async def generate(self, application: str, request: Mapping[str, object]) -> AsyncIterator[Item]:
        self.requests.append(request)
        start = {"replica": "replica-1", "model_version": "tiny@3", "prompt_tokens": 5}
        try:
            asked: Any = request["reading"]
            parser = self.reading.parser(asked, self.prompt_end, all_tokens=False)
        except ApiError as refused:
            yield {"start": start, **refused.as_item()}
            return
        first: Mapping[str, object] = {"start": start}
        sampling = request["sampling"]
        assert isinstance(sampling, dict)
        deltas = self._deltas(with_logprobs=sampling["logprobs"] is not None)
        prompts: Any = SimpleNamespace(piece=lambda token: (f"<{token}>", b"x"))
        async for item in items(deltas, ItemMaker(prompts, {"sampling": {}}, [], whole=True), parser):
            if self.fails is not None and item.get("finish_reason") is not None:
                yield {**first, **self.fails.as_item()}
                return
            yield {**first, **item}
            first = {}

    async def _deltas(self, *, with_logprobs: bool) -> AsyncIterator[Delta]:
        left, self.written, number = self.text, "", 0
        while True:
            size = self.chance.randint(0, 6)
            piece, left = left[:size], left[size:]
            self.written += piece
            number += 1
            logprobs = (TokenLogprob(number, -0.5, ((number, -0.5),)),) if with_logprobs else ()
            stop = None if left else self.stop_string
            yield Delta(piece, (number,), logprobs, None if left else self.ends, stop_string=stop)
            if not left:
                return
            await asyncio.sleep(0)


@cache
def _gateway_that(*, ignores_unknown: bool) -> StubGateway:
    return StubGateway(options=GatewayOptions(ignore_unknown=ignores_unknown))


def gateway_of(backend: WritingBackend, *, ignore_unknown: bool = False) -> StubGateway:
    """A gateway before this backend; it is made once, since that takes longer than most tests."""
    gateway = _gateway_that(ignores_unknown=ignore_unknown)
    gateway.backend = gateway.service.backend = backend
    return gateway
