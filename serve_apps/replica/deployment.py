"""One replica of an app: a group of ranks that lives, serves and ends as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cluster.errors import ShoalError
from cluster.wording import logs_of
from serve_apps.engine.config import engine_config
from serve_apps.engine.devices import hide_what_is_not_leased
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.meeting_place import MeetingPlace
from serve_apps.engine.protocol import (
    EngineError,
    SamplingParams,
    WeightsError,
)
from serve_apps.engine.weight_files import check_same_shapes, read_ahead
from serve_apps.http.log import log_as_json
from serve_apps.http.request_record import Answering, RequestRecord, client_id
from serve_apps.models import model_directory
from serve_apps.openai.errors import ApiError, gateway_unreachable, replica_lost
from serve_apps.replica.chat import chat_of, engines_reasoning
from serve_apps.replica.controller_link import ControllerLink
from serve_apps.replica.embeddings import EmbeddingSizes, as_asked
from serve_apps.replica.fit import cut, fit
from serve_apps.replica.gateway_calls import GatewayCalls
from serve_apps.replica.item_maker import ItemMaker
from serve_apps.replica.items import item_of, items
from serve_apps.replica.prompts import Prompts
from serve_apps.replica.rank_group import RankGroup
from serve_apps.replica.refusals import REFUSALS, refusal
from serve_apps.replica.watchdog import Watchdog
from serve_apps.spec import AppSpec
from serve_apps.tokens.inbox import merge
from serve_apps.tokens.stream import UnreachableError

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 15.0
"""A replica whose event loop stands still for so long is killed."""
WATCH_EVERY_S = 0.5
"""How often a replica looks whether its engine is whole, and shows that it lives itself."""


class Replica:
    """The Serve deployment's class; rank 0 runs in its process, the other ranks in actors beside it.

    Args:
        spec: an `AppSpec` as JSON.
        application: the Serve application's name, APP:REVISION; None keeps apart from the controller.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, spec: Mapping[str, Any], application: str | None = None
    ) -> None:
        import ray
        from ray import serve

        log_as_json()
        self._started_at, self._ready_at = _now(), ""
        self.spec = AppSpec.from_json(spec)
        self.id = serve.get_replica_context().replica_tag
        self.revision = 0
        """The number of the revision whose weights it has."""
        self._prepared: int | None = None
        self._refused: int | None = None
        self._refusal: str | None = None
        self._link: ControllerLink | None = None
        if application is not None:
            self.revision = int(application.rpartition(":")[2])
            self._link = ControllerLink(application, self.id, self._facts, self._obey)
            now = await self._link.spec()
            if now is not None:
                self.revision, self.spec = now["revision"], AppSpec.from_json(now["spec"])
        self._gateways = GatewayCalls(self._tell_orphans)
        self._node = ray.util.get_node_ip_address()
        self._group = RankGroup(self.spec, f"{serve.get_replica_context().app_name}#{self.id}")
        await self._start_in_time()
        self._ready_at, self._ready = _now(), time.monotonic()
        self._watching = asyncio.create_task(self._watch())
        self._linked = asyncio.create_task(self._link.run()) if self._link is not None else None

    async def _start_in_time(self) -> None:
        """End a replica that hangs while it starts, so that another comes: Serve would wait for ever."""
        seconds = self.spec.config.update.ready_timeout_s
        watchdog = Watchdog(seconds + HANG_TIMEOUT_S)  # for when even this event loop stands still
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._start()
        except TimeoutError:
            if limit.expired():
                self._lost(f"it was not ready within {seconds:g} s")
            raise
        finally:
            watchdog.stop()

    async def _start(self) -> None:
        model_path = await asyncio.to_thread(model_directory, self.spec)
        config = engine_config(self.spec, model_path)
        hide_what_is_not_leased(config)
        self._place = MeetingPlace()
        host, port = self._place.host, self._place.port
        entry = find_engine(self.spec.engine)
        if not entry.has_own_ranks:
            self._group.start(config, host, port, self._lost)
        self._prompts = await asyncio.to_thread(Prompts, model_path)
        config = replace(config, reasoning=engines_reasoning(self._prompts, self.spec.config))
        self._engine = entry.load_engine()(config, host, port)
        self._embedding_sizes = EmbeddingSizes.of(model_path)
        try:
            await self._engine.start()
        except EngineError as error:
            everything = logs_of(self.spec.name, replica=self.id)
            raise EngineError(f"{error}; {everything} has all that it said") from error
        self._chat = chat_of(self._engine, self._prompts, self.spec.config)

    def _lost(self, why: str) -> None:
        # Half a group answers nothing. Its process ends at once, so that the router drops it now and the
        # gateway sends its requests elsewhere; the placement group goes and a whole new group comes.
        logger.error("replica %s ends: %s", self.id, why)
        self._group.kill()
        logging.shutdown()
        os._exit(1)

    async def _watch(self) -> None:
        watchdog = Watchdog(HANG_TIMEOUT_S)
        try:
            while True:
                watchdog.beat()
                self._check_engine()
                await asyncio.sleep(WATCH_EVERY_S)
        finally:
            watchdog.stop()

    def _check_engine(self) -> None:
        """End the replica when its engine is broken: it would refuse at once whatever it is sent, and so seem
        to have more room than the others."""
        try:
            self._engine.check()
        except EngineError as error:
            self._lost(str(error))

    def _facts(self) -> dict[str, Any]:
        """What the controller is told."""
        return {
            "revision": self.revision,
            "context_length": self._engine.context_length,
            "prepared": self._prepared,
            "refused": self._refused,
            "refusal": self._refusal,
            "engine": asdict(self._engine.statistics()),
            "started_at": self._started_at,
            "ready_at": self._ready_at,
            "ready_s": time.monotonic() - self._ready,
        }

    async def _obey(self, order: Mapping[str, Any]) -> None:
        """Get ready for another version of the model, or go on with it; both leave what runs as it is when
        they cannot."""
        spec, number = AppSpec.from_json(order["spec"]), order["revision"]
        try:
            path = await asyncio.to_thread(model_directory, spec)
            if order["action"] == "prepare":
                old = await asyncio.to_thread(model_directory, self.spec)
                await asyncio.to_thread(check_same_shapes, old, path)
                await asyncio.to_thread(read_ahead, path)
                self._prepared = number
                return
            prompts, sizes = await asyncio.to_thread(Prompts, path), EmbeddingSizes.of(path)
            await self._engine.load_weights(path)
        except (WeightsError, EngineError, ShoalError, OSError) as error:
            self._refused, self._refusal = number, str(error)
            logger.error("replica %s cannot load revision %d: %s", self.id, number, error)
            if order.get("or_end"):
                self._lost("it cannot go back to the weights that it is to have")
            return
        self.spec, self.revision, self._prompts = spec, number, prompts
        self._chat = chat_of(self._engine, prompts, spec.config)
        self._embedding_sizes = sizes
        self._refused = self._refusal = None

    def statistics(self) -> dict[str, Any]:
        """The engine's statistics and this replica's id and process."""
        return {"replica": self.id, "pid": os.getpid(), **asdict(self._engine.statistics())}

    async def check_health(self) -> None:
        """Raise when the replica cannot go on; Serve then replaces it."""
        self._engine.check()
        if self._watching.done():
            self._watching.result()
        if self._group.lost is not None:
            raise EngineError(self._group.lost)

    async def generate(
        self, request: Mapping[str, Any], address: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run one request of a gateway; the call lasts as long as the request.

        Args:
            request: `request_id`; `prompt` (text or token ids) or `messages` with their `template`;
                `max_tokens` (None: as many as the app allows and the context has room for); `sampling` (the
                other SamplingParams); `priority` and `cache_salt` where there are any; what
                `Request.prompt_options` says; of a conversation `reading`, see `ChatRequest.reading`; of one
                that is to be generated once `once`, see `KeptAnswers.find`.
            address: where the gateway receives tokens (a StreamAddress); with it, the request ends when the
                gateway is gone.

        Returns:
            Where it is not `streamed` the whole answer: an Item, and `start`: {replica,
            model_version, prompt_tokens}. Else only how it ended; what it gains goes to the address as it
            comes, the first item with `start`, the last with `finish_reason`. A request that cannot be run
            returns `start` and `error`, see ApiError.as_item; so does one whose engine breaks, with
            `engine_broke`.
        """

        once = request.get("once") if address is not None else None

        async def answer(start: dict[str, Any]) -> dict[str, Any]:
            kept = self._gateways.find(once)
            if kept is not None:
                assert address is not None
                return await self._gateways.join(kept, request, address)
            if address is not None:
                await self._gateways.connect(address)  # before anything is generated that cannot be told
            whole = await self._chat.encode(request)
            prompt_ids = cut(whole, request, self._engine.context_length, request["max_tokens"])
            start["prompt_tokens"] = len(prompt_ids)
            reader, asked = self._chat.read(request, prompt_ids)
            sampling = self._sampling({**request, "sampling": asked}, len(prompt_ids))
            maker = ItemMaker(self._prompts, request, prompt_ids, whole=len(whole) == len(prompt_ids))
            deltas = self._engine.generate(
                request["request_id"],
                prompt_ids,
                sampling,
                request.get("priority", 0),
                request.get("cache_salt", ""),
            )
            if address is None:
                return dict(merge([item async for item in items(deltas, maker, reader)]))
            if once is not None:
                told = partial(item_of, maker=maker, reader=reader)
                return await self._gateways.generate_once(once, request, address, start, deltas, told)
            with self._gateways.kept_for(address):
                if not request["streamed"]:
                    return dict(merge([item async for item in items(deltas, maker, reader)]))
                send = self._gateways.sends_to(request, address)
                # Read here and not by `items`: one more generator would be paid for at every token.
                async with aclosing(deltas):  # type: ignore[type-var]
                    first = True
                    async for delta in deltas:
                        item = item_of(delta, maker, reader)
                        if first:
                            item["start"], first = start, False
                        send(item)
                        if "finish_reason" in item:
                            break
                return {}

        return await self._answer(request, answer)

    def _tell_orphans(self, keys: Sequence[str]) -> None:
        if self._link is not None:
            self._link.tell_orphans(keys)

    async def _answer(
        self, request: Mapping[str, Any], answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """`start`, and what `answer` returns or `error`; `answer` may add to `start`."""
        with Answering(RequestRecord(client_id(request["request_id"]))):
            return await self._answer_or_say_why(request, answer)

    async def _answer_or_say_why(
        self, request: Mapping[str, Any], answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        start: dict[str, Any] = {"replica": self.id, "model_version": self.spec.model_version}
        if request.get("revision", self.revision) != self.revision:
            # It was sent when this replica had other weights: whoever sent it knows of the change soon.
            return {"start": start, **replica_lost().as_item()}
        try:
            return {"start": start, **await answer(start)}
        except ApiError as refused:
            error = refused
        except UnreachableError as blocked:
            error = gateway_unreachable(self._node, blocked.endpoint)
            logger.error("replica %s: %s", self.id, error.message)
        except REFUSALS as refused:
            error = refusal(refused, request, self.spec.name)
        except EngineError as broken:
            self._check_engine()
            logger.error("the engine broke under a request: %s", broken)
            return {"start": start, **replica_lost().as_item(), "engine_broke": True}
        except Exception:
            logger.exception("a mistake of Shoal's or the engine's")
            raise
        return {"start": start, **error.as_item()}

    async def embed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The mean of a prompt's last hidden states: `start` and `embedding`.

        Args:
            request: `request_id` and `prompt`; `dimensions`, `scaled`, and what `cut` takes.
        """

        async def embedding(start: dict[str, Any]) -> dict[str, Any]:
            self._embedding_sizes.check(request.get("dimensions"))
            prompt_ids = cut(await self._chat.encode(request), request, self._engine.context_length, 0)
            start["prompt_tokens"] = len(prompt_ids)
            whole = await self._engine.embed(request["request_id"], prompt_ids)
            return {"embedding": as_asked(whole, request)}

        return await self._answer(request, embedding)

    async def tokenize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The token ids of a `prompt` or of `messages`: `start`, `tokens` and, with `names`, `token_strs`."""

        async def tokens(start: dict[str, Any]) -> dict[str, Any]:
            ids = await self._chat.encode(request, may_be_empty=True)
            if not request.get("names"):
                return {"tokens": ids}
            return {"tokens": ids, "token_strs": await asyncio.to_thread(self._prompts.names, ids)}

        return await self._answer(request, tokens)

    async def tokenizer_info(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The tokenizer's config: `start` and `info`."""

        async def info(start: dict[str, Any]) -> dict[str, Any]:
            return {"info": self._prompts.info()}

        return await self._answer(request, info)

    async def detokenize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The text of `tokens`: `start` and `prompt`."""

        async def prompt(start: dict[str, Any]) -> dict[str, Any]:
            return {"prompt": await asyncio.to_thread(self._prompts.decode, request["tokens"])}

        return await self._answer(request, prompt)

    def _sampling(self, request: Mapping[str, Any], prompt_tokens: int) -> SamplingParams:
        """Sampling parameters with max_tokens fixed; raises ApiError when prompt and answer do not fit."""
        return fit(
            request,
            prompt_tokens,
            self._engine.context_length,
            asked=request["max_tokens"],
            limit=self.spec.config.limits.max_tokens,
            sampling=request["sampling"],
        )

    async def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            for task in (getattr(self, "_watching", None), getattr(self, "_linked", None)):
                if task is not None:
                    task.cancel()
            with contextlib.suppress(EngineError):
                await engine.stop()
            self._group.stop()
            self._place.close()
            self._gateways.stop()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
