"""One replica of the run: an engine in an actor of Ray Data, which answers shards and writes their files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from cluster.actors.named_actor import NoActorError
from cluster.errors import ShoalError
from cluster.files.backend import MissingError
from cluster.files.storage import Storage
from serve_apps.batch.board import CALL_TIMEOUT_S, find_board
from serve_apps.batch.manifest import MANIFEST, Totals
from serve_apps.batch.plan import Shard
from serve_apps.batch.rank_group import RankGroup
from serve_apps.batch.rows import RowReader, RowRequest, RowResult, totals, with_results
from serve_apps.batch.shard_file import read_totals, write_shard
from serve_apps.batch.shared_lock import SharedLock
from serve_apps.batch.source import Source
from serve_apps.engine.config import engine_config
from serve_apps.engine.devices import hide_what_is_not_leased
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.meeting_place import MeetingPlace
from serve_apps.engine.protocol import AnswerError, EngineError, PromptError, QueueFullError, UnsupportedError
from serve_apps.models import model_directory
from serve_apps.openai.errors import ApiError
from serve_apps.replica.prompts import Prompts
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)

REPORT_S = 0.5
START_TIMEOUT_S = 1800.0
"""Longest that an engine may take to load its model."""
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of a run is made with; plain data."""

    spec: Mapping[str, Any]
    """An AppSpec as JSON."""
    options: Mapping[str, Any]
    """Fields of a request for all rows."""
    input: str
    output: str
    created_at: str
    """That of the manifest, by which a worker knows the right output."""
    board: str

    def as_text(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class _ShardAnswers:
    """A shard in the engine."""

    index: int
    results: list[RowResult] = field(default_factory=list)
    """Those that are there, in no order."""


class ShardWorker:
    """Ray Data's callable class: takes the description of a shard, returns its sums once its file is there.

    Ray Data lets go of it at the end; nothing else refers to it, so that the engine is stopped then. One that
    is not keeps its process, and its devices, for ever.

    Args:
        settings: WorkerSettings as text.
    """

    def __init__(self, settings: str) -> None:
        self._replica = _BatchReplica(WorkerSettings(**json.loads(settings)))

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one shard: the fields of Shard, and `file`, the name of its output."""
        shard = Shard(row["index"], row["path"], row["first_row"], row["rows"])
        return {"index": shard.index, **asdict(self._replica.answer(shard, row["file"]))}

    def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.stop()


class _BatchReplica:
    """An engine with its ranks, and the shards in it.

    `answer` is called from several threads, so that the engine's batch is full while one shard ends and the
    next begins; the engine has an event loop in a thread of its own. When it breaks, the process ends: Ray
    makes a new one, and the shards that were in it are begun again.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._board = find_board(self._settings.board)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self._tokenizing = threading.Lock()
        self._shards: dict[int, _ShardAnswers] = {}
        self._room = SharedLock()
        self._stopping = False
        try:
            self._start()
        except Exception as error:
            why = f"a replica could not be started: {_sentence(error)}"
            self._board.call("fail", why, timeout_s=CALL_TIMEOUT_S)
            raise
        self._board.call("ready", timeout_s=CALL_TIMEOUT_S)

    def _start(self) -> None:
        settings = self._settings
        self._spec = spec = AppSpec.from_json(settings.spec)
        self._output = Storage(settings.output)
        self._check_output()
        self._source = Source(settings.input)
        self._limit = spec.config.limits.max_tokens
        self._rows = RowReader(spec.name, settings.options, spec.config.limits)
        model_path = model_directory(spec)
        in_flight = rows_in_flight(spec)
        self._config = engine_config(spec, model_path, max_waiting=in_flight, watched=False)
        self._prompts = Prompts(model_path)
        self._places = asyncio.Semaphore(in_flight)
        asyncio.run_coroutine_threadsafe(self._start_engine(), self._loop).result(START_TIMEOUT_S)

    def _check_output(self) -> None:
        try:
            seen = json.loads(self._output.read_bytes(MANIFEST))["created_at"]
        except MissingError:
            seen = None
        if seen != self._settings.created_at:
            raise ShoalError(
                f"{self._settings.output} is not the same directory on node"
                f" {ray.util.get_node_ip_address()}: give an --output that every node reaches"
            )

    async def _start_engine(self) -> None:
        hide_what_is_not_leased(self._config)
        self._place = MeetingPlace()
        host, port = self._place.host, self._place.port
        self._group = RankGroup(self._spec)
        entry = find_engine(self._spec.engine)
        if not entry.has_own_ranks:
            self._group.start(self._config, host, port, self._broken)
        self._engine = entry.load_engine()(self._config, host, port)
        await self._engine.start()
        self._reporting = asyncio.create_task(self._report())

    def answer(self, shard: Shard, name: str) -> Totals:
        """Answer the rows of a shard and write its file, if it is not there; returns its sums."""
        if not self._output.exists(name):
            # By itself, so that a shard that breaks the engine is the one that is blamed for it.
            alone = self._board.call("is_suspect", shard.index, timeout_s=CALL_TIMEOUT_S)
            with self._room.enter(alone=alone):
                self._begin_and_answer(shard, name)
        return read_totals(self._output, name)

    def _begin_and_answer(self, shard: Shard, name: str) -> None:
        if not self._board.call("begin", shard.index, timeout_s=CALL_TIMEOUT_S):
            raise ShoalError(f"shard {shard.index} was begun too often")
        try:
            self._answer(shard, name)
        except ShoalError as error:
            self._board.call("fail", str(error), timeout_s=CALL_TIMEOUT_S)
            raise

    def _answer(self, shard: Shard, name: str) -> None:
        table = self._source.read(shard)
        encoded = [self._encode(row) for row in table.to_pylist()]
        answering = self._answer_rows(shard.index, encoded)
        results = asyncio.run_coroutine_threadsafe(answering, self._loop).result()
        done = with_results(table, results, self._spec.model_version)
        write_shard(self._output, name, done, totals(results))

    def _encode(self, row: Mapping[str, Any]) -> tuple[RowRequest, list[int]] | RowResult:
        """A row's request and prompt, or what is wrong with it."""
        try:
            request = self._rows.request(row)
            with self._tokenizing:
                return request, self._prompts.encode(request.prompt)
        except ApiError as error:
            return RowResult(error=error.message)

    async def _answer_rows(
        self, index: int, encoded: Sequence[tuple[RowRequest, list[int]] | RowResult]
    ) -> list[RowResult]:
        answering = self._shards[index] = _ShardAnswers(index)

        async def one(number: int, row: tuple[RowRequest, list[int]] | RowResult) -> RowResult:
            if not isinstance(row, RowResult):
                async with self._places:
                    row = await self._generate(f"{index}-{number}-{time.monotonic_ns()}", *row)
            answering.results.append(row)
            return row

        try:
            results = await asyncio.gather(*(one(number, row) for number, row in enumerate(encoded)))
        finally:
            del self._shards[index]
        await self._board.ask("report", {index: totals(results)}, timeout_s=CALL_TIMEOUT_S)
        return results

    async def _generate(self, request_id: str, request: RowRequest, prompt_ids: list[int]) -> RowResult:
        text, tokens, finish_reason = [], 0, None
        try:
            sampling = request.fit(len(prompt_ids), self._engine.context_length, self._limit)
            async with aclosing(self._engine.generate(request_id, prompt_ids, sampling)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    text.append(delta.text)
                    tokens += len(delta.token_ids)
                    finish_reason = delta.finish_reason
        except ApiError as refused:
            return RowResult(error=refused.message)
        except (PromptError, UnsupportedError, QueueFullError, AnswerError) as refused:
            return RowResult(error=f"{refused}.")
        except EngineError as broken:
            self._broken(str(broken))
            await asyncio.Event().wait()  # the process is about to end
        if finish_reason not in ("stop", "length"):
            self._broken(f"it ended a request with {finish_reason!r}")
            await asyncio.Event().wait()
        return RowResult("".join(text), finish_reason, len(prompt_ids), tokens)

    async def _report(self) -> None:
        """Say how far the shards are, and look whether the engine is whole, until the process ends."""
        while True:
            await asyncio.sleep(REPORT_S)
            if self._shards:
                self._board.tell("report", {s.index: totals(s.results) for s in self._shards.values()})
            try:
                self._engine.check()
            except EngineError as broken:
                self._broken(str(broken))
                return

    def _broken(self, why: str) -> None:
        """End this process, and with it what is left of the group: Ray makes a whole new one."""
        if self._stopping:
            return
        logger.error("%s: a replica ends: %s", self._spec.name, why)
        with contextlib.suppress(ray.exceptions.RayError, NoActorError):
            # Ray's words about a process that died go on for many lines.
            first = why.strip().partition("\n")[0]
            self._board.call("lost", f"a replica's engine broke: {first}", timeout_s=2)
        logging.shutdown()
        os._exit(1)

    def stop(self) -> None:
        """Free the model and the devices."""

        async def stop() -> None:
            self._stopping = True
            self._reporting.cancel()
            await self._engine.stop()
            self._group.stop()

        with contextlib.suppress(EngineError, TimeoutError):
            asyncio.run_coroutine_threadsafe(stop(), self._loop).result(STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)


def rows_in_flight(spec: AppSpec) -> int:
    """Rows that are in an engine at once: its batch, and as many that can take a place at once."""
    return 2 * spec.config.limits.batch


def _sentence(error: BaseException) -> str:
    if isinstance(error, ShoalError):
        return str(error)
    return f"{type(error).__name__}: {error}"
