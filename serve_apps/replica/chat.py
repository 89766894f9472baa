"""A served model's conversations: how they are rendered to tokens, and how its answers are read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cluster.config.sections.serve import ServeAppConfig
from serve_apps.engine.protocol import STRUCTURES, Engine, EngineChat, UnsupportedError
from serve_apps.parsing.answer_parser import Reader
from serve_apps.parsing.thinking import END
from serve_apps.replica.prompts import Prompts
from serve_apps.replica.reading import AnswerReading

logger = logging.getLogger(__name__)

LONG_TEXT = 8192
"""Characters from which tokenizing happens beside the event loop, so that the others go on."""

Sampling = Mapping[str, Any]


class Chat(Protocol):
    """The conversations of one model, and its prompts."""

    async def encode(self, request: Mapping[str, Any], *, may_be_empty: bool = False) -> list[int]:
        """The token ids of a request, see `Prompts.encode`."""

    def read(self, request: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Reader | None, Sampling]:
        """What reads a request's answer, None where all of it is words; and the sampling with what it needs.

        Raises:
            ApiError, UnsupportedError: the answer cannot be read as the request asks.
        """


class OwnChat:
    """By the model's own chat template, and Shoal's parsers."""

    def __init__(self, prompts: Prompts, reading: AnswerReading) -> None:
        self._prompts = prompts
        self._reading = reading

    async def encode(self, request: Mapping[str, Any], *, may_be_empty: bool = False) -> list[int]:
        """See Chat."""
        size = sum(len(str(m)) for m in request.get("messages", ())) + len(request.get("prompt", ""))
        if size < LONG_TEXT:
            return self._prompts.encode(request, may_be_empty=may_be_empty)
        return await asyncio.to_thread(self._prompts.encode, request, may_be_empty=may_be_empty)

    def read(self, request: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Reader | None, Sampling]:
        """See Chat."""
        sampling: Sampling = request["sampling"]
        if "reading" not in request:
            return None, sampling
        asked, end = request["reading"], self._prompts.end_of(prompt_ids)
        all_tokens = not sampling.get("skip_special_tokens", True)
        parser = self._reading.parser(asked, end, all_tokens=all_tokens)
        return parser, sampling if parser is None else self._reading.sampling(asked, end, sampling)


class EnginesChat(OwnChat):
    """By the engine's own ways with conversations; prompts that are text are the tokenizer's."""

    def __init__(self, prompts: Prompts, reading: AnswerReading, chat: EngineChat) -> None:
        super().__init__(prompts, reading)
        self._chat = chat

    async def encode(self, request: Mapping[str, Any], *, may_be_empty: bool = False) -> list[int]:
        """See Chat."""
        if "messages" not in request:
            return await super().encode(request, may_be_empty=may_be_empty)
        how = {name: request[name] for name in ("special_tokens", "cut", "cut_side") if name in request}
        return await self._chat.render(request["messages"], {**(request.get("template") or {}), **how})

    def read(self, request: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Reader | None, Sampling]:
        """See Chat."""
        sampling: Sampling = request["sampling"]
        if "reading" not in request:
            return None, sampling
        reader = self._chat.reader(request["reading"], prompt_ids)
        if reader is None:
            return None, sampling
        changes: dict[str, Any] = {"skip_special_tokens": False} if reader.shows_special_tokens else {}
        if any(sampling.get(kind) for kind in STRUCTURES):
            if not reader.takes_structures:
                raise UnsupportedError(
                    "this model's answers come in channels, for which a structure leaves no room: they can "
                    "be held to none, and no calls of tools can be forced"
                )
            if (end := reader.reasoning_end) is not None:
                changes["reasoning"] = (None, end)
        return reader, {**sampling, **changes}


def reading_of(prompts: Prompts, config: ServeAppConfig) -> AnswerReading:
    """How the answers of a model are read, by the app's config and the model's template."""
    return AnswerReading(
        prompts.template.text, config.tools, config.reasoning, prompts.token_of, prompts.special_tokens
    )


def engines_reasoning(prompts: Prompts, config: ServeAppConfig) -> str | None:
    """The parser by which an engine that has such parsers knows where reasoning ends; None for none."""
    if config.reasoning is not None:
        return None if config.reasoning == "none" else config.reasoning
    # They go by tokens, which a template does not promise.
    return None if prompts.token_of(END) is None else reading_of(prompts, config).reasoning


def chat_of(engine: Engine, prompts: Prompts, config: ServeAppConfig) -> Chat:
    """The conversations of the model that an engine runs, which has started.

    Raises:
        UnsupportedError: the engine has no parser of the name that the config gives.
    """
    reading = reading_of(prompts, config)
    try:
        chat = engine.chat(reading.tools, engines_reasoning(prompts, config))
    except UnsupportedError as error:
        if config.tools is not None:
            raise
        logger.warning("calls of tools are not read: %s", error)
        chat = engine.chat(None, engines_reasoning(prompts, config))
    return OwnChat(prompts, reading) if chat is None else EnginesChat(prompts, reading, chat)
