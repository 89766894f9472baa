"""The line between a replica and its engine, two processes: calls both ways, of any length."""

from __future__ import annotations

import asyncio
import pickle
import struct
import traceback
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Literal

from cluster.errors import ShoalError
from serve_apps.engine.protocol import EngineError

_LENGTH = struct.Struct("!Q")
_OURS = ("serve_apps.", "cluster.", "builtins", "asyncio.", "tests.")
"""Modules of the exceptions that both ends know."""

_Frame = Literal["call", "tell", "cancel", "done", "failed"]


class LineLostError(ShoalError):
    """The process at the other end is gone, or never was there."""


class CallEndedError(ShoalError):
    """The other end has ended a call, since nobody waits for what it gives; who has called did not say so."""


class EngineLine:
    """One end. Only processes of Shoal's speak here, which trust each other.

    Args:
        answers: whose methods are called from the other end; a coroutine runs beside the others, and is
            cancelled where who has called does not wait for it any more.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: object) -> None:
        self._reader = reader
        self._writer = writer
        self._answers = answers
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._next = 0
        self._lost = False

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method at the other end; cancelling this cancels it there.

        Raises:
            LineLostError: the other end is gone.
            CallEndedError: the other end has ended this call.
            Exception: what the method raised; where only that end knows it, an EngineError that says it.
        """
        if self._lost:
            raise LineLostError("the engine's process is gone")
        self._next += 1
        number = self._next
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("call", number, (method, arguments))
            return await answer
        except asyncio.CancelledError:
            self._send("cancel", number, None)
            raise
        finally:
            self._asked.pop(number, None)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method at the other end, and wait for nothing."""
        self._send("tell", 0, (method, arguments))

    async def run(self) -> None:
        """Answer until the other end is gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                kind, number, content = pickle.loads(await self._reader.readexactly(length))
                self._hear(kind, number, content)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Nobody is called or answered any more."""
        self._lost = True
        self._writer.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(LineLostError("the engine's process is gone"))
        for task in self._answering.values():
            task.cancel()

    def _hear(self, kind: _Frame, number: int, content: Any) -> None:
        if kind == "tell":
            method, arguments = content
            getattr(self._answers, method)(*arguments)
        elif kind == "call":
            task = self._answering[number] = asyncio.create_task(self._answer(number, *content))
            task.add_done_callback(lambda _: self._answering.pop(number, None))
        elif kind == "cancel":
            if number in self._answering:
                self._answering[number].cancel()
        elif (answer := self._asked.get(number)) is not None and not answer.done():
            if kind == "done":
                answer.set_result(content)
            else:
                answer.set_exception(_exception_of(content))

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = getattr(self._answers, method)(*arguments)
            if isawaitable(answer):
                answer = await answer
            self._send("done", number, answer)
        except asyncio.CancelledError:
            # Not always by who has called: that may wait, and would for ever.
            self._send("failed", number, _as_it_travels(CallEndedError("the call was ended")))
        except Exception as error:  # noqa: BLE001  (the caller's to judge)
            self._send("failed", number, _as_it_travels(error))

    def _send(self, kind: _Frame, number: int, content: Any) -> None:
        if not self._lost:
            message = pickle.dumps((kind, number, content), pickle.HIGHEST_PROTOCOL)
            self._writer.write(_LENGTH.pack(len(message)) + message)


def _as_it_travels(error: Exception) -> bytes | str:
    """An exception that both ends know as it is; of another what it says."""
    if type(error).__module__.startswith(_OURS):
        with suppress(Exception):
            said = pickle.dumps(error)
            pickle.loads(said)  # one whose class takes other arguments than it keeps
            return said
    return "".join(traceback.format_exception(error)).strip()


def _exception_of(content: bytes | str) -> Exception:
    if isinstance(content, str):
        return EngineError(content)
    error: Exception = pickle.loads(content)
    return error
