"""How one request of vLLM's ends when vLLM fails it, with vLLM's own exceptions played."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from serve_apps.engine.process_family import ProcessFamily
from serve_apps.engine.protocol import (
    AnswerError,
    Delta,
    EngineConfig,
    EngineError,
    FinishReason,
    PromptError,
)
from serve_apps.engine.structures import compiled, is_whole
from serve_apps.engine.vllm_engine import VllmEngine
from serve_apps.engine.vllm_requests import end_of
from serve_apps.engine.vllm_start import start_vllm
from serve_apps.engine.vllm_statistics import VllmStatistics


class EngineGenerateError(Exception):
    pass


class EngineDeadError(Exception):
    pass


class VLLMClientError(Exception):
    pass


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("vllm", "vllm.exceptions", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["vllm.exceptions"]).update(VLLMClientError=VLLMClientError)
    vars(modules[names[-1]]).update(EngineGenerateError=EngineGenerateError, EngineDeadError=EngineDeadError)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("finish", "stop", "ends"),
    [("stop", None, 7), ("length", None, None), ("stop", "a stop string", None), (None, None, None)],
)
def test_an_answer_ends_by_itself_where_a_token_ends_it(
    finish: FinishReason | None, stop: str | None, ends: int | None
) -> None:
    assert end_of(Delta("", (5, 7), (), finish, stop_string=stop)) == ends


@pytest.mark.parametrize(("text", "whole"), [('{"a":1}', True), ('{"a":', False), ("", False)])
def test_half_a_structured_answer_is_no_answer(text: str, whole: bool) -> None:
    assert is_whole(compiled("json_schema", '{"type": "object"}'), text) is whole


@pytest.mark.parametrize(
    ("vllm", "raised", "told"),
    [
        (SimpleNamespace(errored=False), EngineGenerateError, AnswerError),
        (SimpleNamespace(errored=True), EngineGenerateError, EngineError),
        (None, EngineGenerateError, EngineError),  # the engine was stopped meanwhile
        (SimpleNamespace(errored=True), EngineDeadError, EngineError),
        (SimpleNamespace(errored=False), ValueError, PromptError),
        (SimpleNamespace(errored=False), VLLMClientError, PromptError),
        (SimpleNamespace(errored=False), KeyError, AnswerError),  # what nobody has thought of
    ],
)
def test_its_reader_learns_of_every_failure(
    vllm: Any, raised: type[Exception], told: type[Exception]
) -> None:
    async def outputs() -> AsyncIterator[Any]:
        raise raised
        yield

    async def go() -> None:
        engine = VllmEngine(EngineConfig("/nowhere"))
        engine._vllm = vllm
        queue: asyncio.Queue[Any] = asyncio.Queue()
        await engine._read(outputs(), queue)
        assert type(queue.get_nowait()) is told

    asyncio.run(go())


def test_what_vllm_has_no_use_for_is_refused() -> None:
    with pytest.raises(EngineError, match=r"limits\.prefill_ms has no effect in vLLM"):
        start_vllm(EngineConfig("./model", prefill_ms=50.0), {}, VllmStatistics(), ProcessFamily())
