"""The choices of one request, each a stream of its own from some replica, tried again where one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from serve_apps.gateway.app_table import AppVersion
from serve_apps.gateway.backend import Backend, ReplicaLostError, raise_if_failed
from serve_apps.gateway.broken_engines import Suspect
from serve_apps.gateway.repeats import Once
from serve_apps.gateway.shared_prompts import tokenized_once
from serve_apps.gateway.traffic import Traffic
from serve_apps.http.request_record import client_id
from serve_apps.openai.errors import ApiError, engines_broke, replica_lost, timed_out
from serve_apps.openai.format import ChoiceEvent
from serve_apps.replica.kept_answers import key_of_part
from serve_apps.routing.spread import AT
from serve_apps.tokens.inbox import Item, merge

RETRIES = 3
"""Times a request is sent again after its replica was lost."""


_SHOWN = ("logprobs", "reasoning", "calls", "finish_reason")


class _VersionFailedError(Exception):
    """A version could not answer, and another may, now or soon."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"revision {revision} failed")
        self.revision = revision


class Choices:
    """The choices of one request while they are generated; leaving the context ends those that still run.

    All choices are answered by one version of the app. Where it fails and another takes requests, or may do
    so soon, all of them start again there, unless the client has seen something of one already.

    Args:
        once: who asks again is to be answered by what is generated already; None: it may be generated twice.
        restartable: nothing reaches the client before the end, so a choice may start again at any time;
            else only while it has shown the client nothing.
    """

    def __init__(
        self,
        backend: Backend,
        traffic: Traffic,
        app: str,
        requests: Sequence[Mapping[str, Any]],
        *,
        restartable: bool,
        timeout_s: float,
        once: Once | None = None,
    ) -> None:
        self._backend = backend
        self._traffic = traffic
        self._app = app
        self._requests = requests
        self._once = once
        self._restartable = restartable
        self._timeout_s = timeout_s
        self._queue: asyncio.Queue[ChoiceEvent | Exception | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._version: AppVersion | None = None
        self._seen = False
        """A choice has something to show."""
        self._moved = False
        self._suspect = Suspect(traffic.broken, len(requests))
        self.replicas: list[str] = []
        """The replicas that took a choice, in the order they did."""
        self.model_version: str | None = None
        self.prompt_tokens: dict[int, int] = {}
        """By choice."""
        self.cached_tokens: dict[int, int] = {}
        """By choice, where its engine says it: of those, the tokens that were in the cache."""

    async def __aenter__(self) -> Choices:
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._timeout_s
        # One timer for all of it: one for each event would be paid for at every token.
        self._timer = loop.call_at(self._deadline, self._time_out)
        self._tasks = [asyncio.create_task(self._begin(avoid=()))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._end(self._tasks)
        self._suspect.end()
        self._leave()

    async def events(self) -> AsyncIterator[ChoiceEvent]:
        """What the choices gain, until each has its last.

        Raises:
            ApiError: a choice failed (which ends all of them), or the time is over.
        """
        running = len(self._requests)
        while running:
            event = await self._queue.get()
            if isinstance(event, ChoiceEvent):
                yield event
            elif event is None:
                running -= 1
            elif isinstance(event, _VersionFailedError):
                await self._move(event)
                running = len(self._requests)
            else:
                raise event

    def _time_out(self) -> None:
        self._queue.put_nowait(timed_out(self._timeout_s))

    async def _begin(self, avoid: Collection[int]) -> None:
        """Start every choice, once a version takes them."""
        self._version = version = await self._traffic.take(self._app, len(self._requests), avoid)
        again = bool(avoid)
        try:
            kept = await self._kept(version)
            requests = await tokenized_once(self._tokenize, version, self._requests)
        except Exception as error:  # noqa: BLE001 - raised again by `events`, for whoever reads them
            self._queue.put_nowait(error)
            return
        self._tasks += [
            asyncio.create_task(self._choice(i, {**r, **self._named(i, kept)}, again=again))
            for i, r in enumerate(requests)
        ]

    async def _kept(self, version: AppVersion) -> Mapping[int, str]:
        """The replicas that keep what another gateway has asked for, before it died."""
        if self._once is None or self._once.wait_s is None:
            return {}
        return await self._backend.kept(version.application, self._once.key, self._once.wait_s)

    def _named(self, index: int, kept: Mapping[int, str]) -> dict[str, Any]:
        """What says of a part of a request that it is to be generated once, and where it is already."""
        if self._once is None:
            return {}
        named: dict[str, Any] = {"once": {"key": key_of_part(self._once.key, index), "body": self._once.body}}
        return {**named, AT: kept[index]} if index in kept else named

    async def _tokenize(self, version: AppVersion, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tokens of a prompt, before any choice starts; a replica may break under that too."""
        try:
            with self._suspect.sending(0, request) as sent:
                result = await self._backend.ask(version.application, "tokenize", sent)
                raise_if_failed(result)
        except ReplicaLostError as lost:
            if lost.broken is not None:
                self._broke(version, lost.broken, request)
            raise
        return result

    def _broke(self, version: AppVersion, engine: str, request: Mapping[str, Any]) -> None:
        """Note that an engine broke under the request.

        Raises:
            ApiError: it is to blame.
        """
        self._traffic.broke(version, engine, self._suspect)
        if self._suspect.guilty:
            raise engines_broke(self._app, client_id(request["request_id"]))

    async def _move(self, failed: _VersionFailedError) -> None:
        """Start all choices again, at another version; once, so that two that fail end it."""
        self._moved = True
        tasks, self._tasks = self._tasks, []
        await self._end(tasks)
        while not self._queue.empty():
            self._queue.get_nowait()
        self._leave()
        self.replicas.clear()
        self._tasks = [asyncio.create_task(self._begin(avoid=(failed.revision,)))]
        if asyncio.get_running_loop().time() >= self._deadline:
            self._time_out()  # what said so may have been in the queue

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        # What a task starts while it ends is ended too.
        while running := [task for task in (*tasks, *self._tasks) if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _leave(self) -> None:
        version, self._version = self._version, None
        if version is not None:
            self._traffic.leave(version, len(self._requests))

    async def _choice(self, index: int, request: Mapping[str, Any], *, again: bool) -> None:
        version = self._version
        assert version is not None
        request = {**request, "revision": version.revision}
        try:
            for retries_left in range(RETRIES, -1, -1):
                restarted = again or retries_left < RETRIES
                if await self._attempt(index, request, version, retries_left, restarted=restarted):
                    break
            self._queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again by `events`, for whoever reads them
            self._queue.put_nowait(error)

    async def _attempt(
        self,
        index: int,
        request: Mapping[str, Any],
        version: AppVersion,
        retries_left: int,
        *,
        restarted: bool,
    ) -> bool:
        """Whether the choice is complete; False asks for another attempt."""
        held: list[Item] = []
        shown = False
        try:
            with self._suspect.sending(index, request) as sent:
                items = self._backend.generate(version.application, sent)
                async with aclosing(items):  # type: ignore[type-var]
                    async for item in items:
                        if "start" in item:
                            self._started(index, item["start"])
                        raise_if_failed(item)
                        if item.get("finish_reason") == "abort":
                            raise replica_lost()
                        if item.get("cached_tokens") is not None:
                            self.cached_tokens[index] = item["cached_tokens"]
                        held.append(item)
                        if not (shown or _shows(item)):
                            # Whose client has seen nothing of it may start again at another replica.
                            continue
                        self._queue.put_nowait(ChoiceEvent(index, merge(held), restarted=restarted))
                        held.clear()
                        restarted = False
                        shown = self._seen = True
                        if item.get("finish_reason") is not None:
                            self._traffic.answered(version)
                            return True
            raise replica_lost()
        except ReplicaLostError as lost:
            error, broken = replica_lost(), lost.broken
        except ApiError as refused:
            error, broken = refused, None
        failed, proven = error.status >= 500, self._traffic.proven(version)
        if broken is None:
            self._traffic.refused(version, failed=failed)
        else:
            self._broke(version, broken, request)
        elsewhere = failed and not self._moved and (self._restartable or not self._seen)
        if elsewhere and self._traffic.other(self._app, version):
            raise _VersionFailedError(version.revision)
        if elsewhere and broken is not None and not proven and self._traffic.on_trial(self._app, version):
            # It may break under everything: its next engine is not tried, as the way back may come first.
            raise _VersionFailedError(version.revision)
        if error.retry_elsewhere and retries_left and (self._restartable or not shown):
            return False
        if elsewhere and self._traffic.on_trial(self._app, version):
            raise _VersionFailedError(version.revision)
        raise error

    def _started(self, index: int, start: Mapping[str, Any]) -> None:
        if start["replica"] not in self.replicas:
            self.replicas.append(start["replica"])
        self.model_version = start["model_version"]
        if "prompt_tokens" in start:
            self.prompt_tokens[index] = start["prompt_tokens"]


def _shows(item: Item) -> bool:
    """Whether a client learns anything from it: a token may be half a character, or have no text at all."""
    return bool(item["text"] or any(item.get(name) for name in _SHOWN))
