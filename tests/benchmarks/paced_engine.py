"""An engine that keeps time like one with a model and costs nothing: it sleeps where that would compute.

Continuous batching: every step all running requests gain one token; a step takes longer the more of them run
and the more tokens of prompts are read in it, and what a prompt begins with is not read again while it is in
the prefix cache (blocks of tokens, the ones used longest ago go first).

Steps are due by a clock of their own, so that a late wake-up is not added to the next step; how late they
were is noted beside the model, since a machine that is too busy to wake the engine in time measures itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from serve_apps.engine.protocol import Delta, EngineConfig, QueueFullError, SamplingParams, Statistics

ENGINE = "tests.benchmarks.paced_engine:PacedEngine"
BLOCK = 64
"""Tokens of one block of the prefix cache."""
MOST_LATE_S = 0.1
"""What a step is later than this is not caught up."""
NOTE_EVERY_S = 0.5


@dataclass(frozen=True)
class Pace:
    """How fast the engine is: `engine_kwargs` of an app."""

    step_s: float = 0.04
    """A step without requests."""
    request_s: float = 0.001
    """What each running request adds to a step."""
    prompt_token_s: float = 0.00025
    """What each token of a prompt adds to the step that reads it."""
    cached_tokens: int = 16384
    """Tokens that the prefix cache of a replica holds."""
    speeds: tuple[float, ...] = (1.0,)
    """By replica: times are divided by its speed. One replica each; with one entry all have it."""

    def kwargs(self) -> dict[str, Any]:
        return {**vars(self), "speeds": list(self.speeds)}

    def busy_s(self, prompt_tokens: float, answer_tokens: float, batch: int) -> float:
        """Seconds that one request takes of a replica of speed 1 whose batch is always full."""
        step_s = self.step_s + batch * self.request_s
        return prompt_tokens * self.prompt_token_s + answer_tokens * step_s / batch


@dataclass(eq=False)
class _Request:
    blocks: list[int]
    """For each whole block of the prompt, a hash of the prompt up to its end."""
    prompt_tokens: int
    answer_left: int
    unread: int | None = None
    """Tokens of the prompt that are still to be read; None before the first step."""
    gained: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)


class PacedEngine:
    """Implements serve_apps.engine.protocol.Engine in simulated time."""

    def __init__(self, config: EngineConfig, master_addr: str, master_port: int) -> None:
        self.config = config
        self.context_length = config.context_length or 4096
        self._pace = Pace(**{**config.extra, "speeds": tuple(config.extra.get("speeds", (1.0,)))})
        self._batched_tokens = config.batched_tokens or 512
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._known: OrderedDict[int, None] = OrderedDict()
        self._woken = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._place: TextIO | None = None
        self._speed = 1.0
        self._noted_at = 0.0
        self._counts = {"prompt_tokens": 0, "found_tokens": 0, "generated_tokens": 0, "steps": 0}
        self._late_s = self._latest_s = 0.0

    async def start(self) -> None:
        self._speed = self._take_place()
        self._steps = asyncio.create_task(self._step_forever())

    def _take_place(self) -> float:
        """The speed of the first place that no other replica has; it is this one's as long as it lives."""
        speeds = self._pace.speeds
        for number, speed in enumerate(speeds) if len(speeds) > 1 else ():
            place = Path(self.config.model_path, f"place-{number}").open("w")  # noqa: SIM115 - held for life
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                place.close()
                continue
            self._place = place
            return speed
        return speeds[-1]

    async def _step_forever(self) -> None:
        loop, pace = asyncio.get_running_loop(), self._pace
        due = 0.0
        while True:
            if not self._requests:
                self._note()
                self._woken.clear()
                await self._woken.wait()
                due = loop.time()
            batch = list(islice(self._requests.values(), self.config.max_batch))
            read = self._read(batch)
            step_s = pace.step_s + len(batch) * pace.request_s + read * pace.prompt_token_s
            due = max(due, loop.time() - MOST_LATE_S) + step_s / self._speed
            await asyncio.sleep(max(0.0, due - loop.time()))
            late_s = loop.time() - due
            self._late_s += late_s
            self._latest_s = max(self._latest_s, late_s)
            self._counts["steps"] += 1
            for request in batch:
                if not request.unread and request.answer_left:
                    request.answer_left -= 1
                    finish = None if request.answer_left else "length"
                    request.gained.put_nowait(Delta(" token", (7,), (), finish))  # type: ignore[arg-type]
                    self._counts["generated_tokens"] += 1
            if loop.time() - self._noted_at > NOTE_EVERY_S:
                self._note()
            # Whoever has its last token leaves before the next step.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _read(self, batch: Sequence[_Request]) -> int:
        """Tokens of prompts that are read in this step."""
        read = 0
        for request in batch:
            if request.unread is None:
                found = next((n for n, b in enumerate(request.blocks) if b not in self._known), None)
                found_tokens = (len(request.blocks) if found is None else found) * BLOCK
                found_tokens = min(found_tokens, request.prompt_tokens - 1)
                request.unread = request.prompt_tokens - found_tokens
                self._counts["prompt_tokens"] += request.prompt_tokens
                self._counts["found_tokens"] += found_tokens
            if request.unread:
                taken = min(request.unread, self._batched_tokens - read)
                request.unread -= taken
                read += taken
                if not request.unread:
                    self._remember(request.blocks)
        return read

    def _remember(self, blocks: Sequence[int]) -> None:
        # The end of a prompt goes before its beginning, without which it is worth nothing.
        for block in reversed(blocks):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) * BLOCK > self._pace.cached_tokens:
            self._known.popitem(last=False)

    def _note(self) -> None:
        """Let the benchmark see what this replica did: a file for each process, beside the model."""
        self._noted_at = asyncio.get_running_loop().time()
        note = {**self._counts, "late_s": self._late_s, "latest_s": self._latest_s}
        path = Path(self.config.model_path, f"note-{os.getpid()}.json")
        path.with_suffix(".new").write_text(json.dumps(note))
        path.with_suffix(".new").rename(path)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        if len(self._requests) >= self.config.max_batch + self.config.max_waiting:
            raise QueueFullError("full")
        blocks = list(_hashes(prompt_ids)) if self.config.prefix_caching else []
        request = _Request(blocks, len(prompt_ids), sampling.max_tokens)
        self._requests[request_id] = request
        self._woken.set()
        try:
            while True:
                delta = await request.gained.get()
                if delta.finish_reason is not None:
                    # Before the reader sees it: its place is free for the next step.
                    del self._requests[request_id]
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._requests.pop(request_id, None)

    async def embed(self, request_id: str, prompt_ids: Sequence[int]) -> list[float]:
        return [0.0]

    async def load_weights(self, model_path: str) -> None:
        pass

    async def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def chat(self, tools: str | None, reasoning: str | None) -> None:
        """Left to the replica; see `Engine.chat`."""

    def statistics(self) -> Statistics:
        running = min(len(self._requests), self.config.max_batch)
        return Statistics(running=running, waiting=len(self._requests) - running, **self._counts)

    def check(self) -> None:
        if self._steps is not None and self._steps.done():
            self._steps.result()

    async def stop(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
        if self._place is not None:
            self._place.close()


def follow(config: EngineConfig, rank: int, master_addr: str, master_port: int) -> None:
    """There are no other ranks."""


def _hashes(prompt_ids: Sequence[int]) -> Iterable[int]:
    before = 0
    for at in range(0, len(prompt_ids) - BLOCK + 1, BLOCK):
        before = hash((before, *prompt_ids[at : at + BLOCK]))
        yield before


@dataclass(frozen=True)
class Notes:
    """What the replicas that have run on a model directory noted, together."""

    found: float
    """Part of the prompts' tokens that were in a prefix cache."""
    late_ms: float
    """How late a step was, on average."""
    latest_ms: float

    @classmethod
    def take(cls, directory: Path) -> Notes:
        """Read the notes of a directory and remove them."""
        notes = []
        for path in directory.glob("note-*.json"):
            notes.append(json.loads(path.read_text()))
            path.unlink()
        steps = sum(note["steps"] for note in notes)
        prompt_tokens = sum(note["prompt_tokens"] for note in notes)
        return cls(
            found=sum(note["found_tokens"] for note in notes) / max(1, prompt_tokens),
            late_ms=sum(note["late_s"] for note in notes) / max(1, steps) * 1000,
            latest_ms=max((note["latest_s"] for note in notes), default=0.0) * 1000,
        )
