"""Batches of offline inference through the control API: each a stream that whoever wants it listens to."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from fastapi.sse import ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field

from cluster.config.loader import mistakes_of_app
from cluster.config.sections.cluster import ClusterConfig, NodeConfig
from cluster.config.sections.serve import ServeAppConfig
from cluster.errors import ConfigError, RequestError
from cluster.models.directory_here import is_uri
from cluster.state.record import ClusterRecord
from infra.api.batch_process import question
from serve_apps.batch.request import BatchRequest

PROCESS = ("-m", "infra.api.batch_process")
MOST_AT_ONCE = 8
LEAVING_S = 30.0
"""Longest that a batch may take to let go of its output, and of its devices, once nobody wants it."""
_LINE_BYTES = 2**20


class BatchBody(BaseModel):
    """What a batch is asked for: an app by its section of the config, and what `shoal batch` takes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    config: ServeAppConfig
    input: str = Field(min_length=1, max_length=4096)
    output: str = Field(min_length=1, max_length=4096)
    options: dict[str, Any] = {}
    replicas: int | None = Field(default=None, ge=1)
    rows_per_shard: int | None = Field(default=None, ge=1)


class Batches:
    """The batches of a cluster. For one event loop.

    Args:
        cluster: its section of the config, paths resolved.
        nodes: what there is to run on.
    """

    def __init__(
        self, record: ClusterRecord, cluster: ClusterConfig, nodes: Callable[[], tuple[NodeConfig, ...]]
    ) -> None:
        self._record, self._cluster, self._nodes = record, cluster, nodes
        self._running = 0
        self._leaving: dict[str, asyncio.subprocess.Process] = {}

    def check(self, name: str, body: BatchBody) -> None:
        """See that a batch can begin.

        Raises:
            ConfigError: the app does not fit the nodes, or its model is not there.
            RequestError: a path that the nodes could not find.
        """
        mistakes = mistakes_of_app(name, body.config, self._cluster, self._nodes())
        if mistakes:
            raise ConfigError(mistakes)
        for key, path in (("input", body.input), ("output", body.output)):
            if not is_uri(path) and not path.startswith("/"):
                raise RequestError(f"{key}: should be a path from the root, or a URI, was {path!r}")

    async def run(self, name: str, body: BatchBody) -> AsyncIterator[ServerSentEvent]:
        """`progress` and `note`; at last `end` with the result, or `failed`. It ends when nobody listens."""
        if self._running >= MOST_AT_ONCE:
            message = f"{MOST_AT_ONCE} batches run already; try again later"
            yield ServerSentEvent(event="failed", data={"message": message, "request": False})
            return
        self._running += 1
        process = None
        try:
            await self._wait_for_last(body.output)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *PROCESS),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            request = BatchRequest(body.input, body.output, body.options, body.replicas, body.rows_per_shard)
            config = body.config.model_dump(mode="json", by_alias=True)
            asked = question(self._record.gcs_address, dict(self._record.env), name, config, request)
            process.stdin.write(asked)
            await process.stdin.drain()
            ended = False
            async for line in process.stdout:
                try:
                    told = json.loads(line)
                    kind, data = told["kind"], told["data"]
                except (ValueError, TypeError, KeyError):
                    continue  # Ray prints there what it likes
                ended = kind in ("end", "failed")
                yield ServerSentEvent(event=kind, data=data)
            if not ended:
                message = f"the process of the batch ended with {await process.wait()}"
                yield ServerSentEvent(event="failed", data={"message": message, "request": False})
        finally:
            self._running -= 1
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
                self._leaving[body.output] = process

    async def _wait_for_last(self, output: str) -> None:
        """Let the one before, whose client was cut off, let go of the output."""
        last = self._leaving.pop(output, None)
        if last is not None:
            try:
                await asyncio.wait_for(last.wait(), LEAVING_S)
            except TimeoutError:
                last.kill()
