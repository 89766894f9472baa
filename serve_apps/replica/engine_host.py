"""What the process of a replica's rank 0 does: it has the engine, and makes answers of what that gives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from cluster.node.memory import memory_of_owner
from cluster.node.shared_imports import tell_imports
from cluster.wording import logs_of
from serve_apps.engine.config import engine_config
from serve_apps.engine.devices import hide_what_is_not_leased
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.meeting_place import MeetingPlace
from serve_apps.engine.memory_check import check_node, memory_of
from serve_apps.engine.node_memory import available_bytes
from serve_apps.engine.protocol import EngineError, PromptError, SamplingParams
from serve_apps.engine.weight_files import check_same_shapes, read_ahead
from serve_apps.http.request_record import Answering, RequestRecord, client_id
from serve_apps.models import model_directory
from serve_apps.openai.errors import ApiError, gateway_unreachable, replica_lost
from serve_apps.replica.chat import chat_of, engines_reasoning
from serve_apps.replica.embeddings import EmbeddingSizes, as_asked
from serve_apps.replica.fit import cut, fit
from serve_apps.replica.gateway_calls import GatewayCalls
from serve_apps.replica.item_maker import ItemMaker
from serve_apps.replica.items import item_of, items
from serve_apps.replica.prompts import Prompts
from serve_apps.replica.refusals import REFUSALS, refusal
from serve_apps.spec import AppSpec
from serve_apps.tokens.inbox import merge
from serve_apps.tokens.stream import UnreachableError

if TYPE_CHECKING:
    from serve_apps.replica.engine_line import EngineLine

logger = logging.getLogger(__name__)

PARKED_SHARE = 0.1
"""Of a node's memory, what parked engines take at most where nobody says."""
PROBE = (1, 2, 3, 4, 5, 6, 7, 8)
PROBE_TOKENS = 8
"""What an engine is asked before it is parked, and when it is woken: any tokens, and so many that follow."""
BEAT_EVERY_S = 0.25
"""How often it shows that it lives, and looks whether the engine is whole."""


class EngineHost:
    """Answers what the replica calls, over `line`; what answers gain goes to the gateways from here.

    Args:
        replica: the replica's id.
        node: the address of this node, for messages.
    """

    line: EngineLine

    def __init__(self, replica: str, node: str) -> None:
        self.id = replica
        self._node = node
        self.revision = 0
        """The number of the revision whose weights it has."""
        self._beating: asyncio.Task[None] | None = None

    async def prepare_start(
        self, spec: Mapping[str, Any], revision: int, parks: bool = False
    ) -> dict[str, Any]:
        """Get ready for a model as far as that takes no device; where the ranks meet: `host` and `port`, and
        whether it `may_load` before it has its devices: where those are CPUs, and the node has the memory.

        Args:
            spec: an `AppSpec` as JSON.
            parks: the engine may be parked.

        Raises:
            ShoalError, OSError: there is no such model.
        """
        self.spec, self.revision = AppSpec.from_json(spec), revision
        self._parks = parks
        self._gateways = GatewayCalls(lambda keys: self.line.tell("tell_orphans", list(keys)))
        self._place = MeetingPlace()
        self._model_path = await asyncio.to_thread(model_directory, self.spec)
        self._prompts = await asyncio.to_thread(Prompts, self._model_path)
        self._embedding_sizes = EmbeddingSizes.of(self._model_path)
        await asyncio.to_thread(read_ahead, self._model_path)
        may_load = await asyncio.to_thread(self._may_load)
        return {"host": self._place.host, "port": self._place.port, "may_load": may_load}

    def _may_load(self) -> bool:
        if self.spec.replica_resources.get("GPU"):
            return False
        config = engine_config(self.spec, self._model_path)
        try:
            check_node(config, memory_of(config, self._model_path))
        except EngineError:
            return False  # whoever leaves may have what is missing
        return True

    async def start(self, visible: Mapping[str, str]) -> dict[str, Any]:
        """Load the model; what the replica has to know of it: `context_length`, and the first `statistics`.

        Args:
            visible: the variables that show the engine's devices.

        Raises:
            EngineError: it cannot be loaded.
        """
        os.environ.update(visible)
        self._visible = dict(visible)
        config = engine_config(self.spec, self._model_path, parks=self._parks)
        hide_what_is_not_leased(config)
        config = replace(config, reasoning=engines_reasoning(self._prompts, self.spec.config))
        load = find_engine(self.spec.engine).load_engine()
        self._engine = load(config, self._place.host, self._place.port)
        try:
            await self._engine.start()
        except EngineError as error:
            everything = logs_of(self.spec.name, replica=self.id)
            raise EngineError(f"{error}; {everything} has all that it said") from error
        tell_imports()
        self._chat = chat_of(self._engine, self._prompts, self.spec.config)
        self._beating = asyncio.create_task(self._beat())
        return {"context_length": self._engine.context_length, "statistics": self.statistics()}

    async def _beat(self) -> None:
        while True:
            self._check_engine()
            self.line.tell("beat", asdict(self._engine.statistics()))
            await asyncio.sleep(BEAT_EVERY_S)

    def _check_engine(self) -> None:
        """Have the replica end when its engine is broken: it would refuse at once whatever it is sent, and so
        seem to have more room than the others."""
        try:
            self._engine.check()
        except EngineError as error:
            self.line.tell("lost", str(error))

    async def park(self, most_bytes: int | None) -> dict[str, int] | None:
        """Give the engine's devices back, and keep its weights: `bytes` of memory that its processes take
        then, pages that they share with others by their share, and `most_bytes`. None: that cannot be, and it
        goes on.

        Args:
            most_bytes: what all parked engines of this node may take; None: a tenth of its memory.

        Raises:
            EngineError: it broke over it.
        """
        most = int(psutil.virtual_memory().total * PARKED_SHARE) if most_bytes is None else most_bytes
        known = memory_of(engine_config(self.spec, self._model_path), self._model_path)
        if known is not None and known.weight_bytes > min(most, available_bytes()):
            return None
        try:
            before = await self._probe()
        except PromptError:
            return None  # its model knows too few tokens, or takes too few
        if not await self._engine.park():
            return None
        self._before = before
        return {"bytes": await asyncio.to_thread(memory_of_owner), "most_bytes": most}

    async def wake(self, visible: Mapping[str, str], revision: int) -> dict[str, Any]:
        """Go on after `park`; what `start` returns.

        Args:
            visible: the variables that show the engine's devices.

        Raises:
            EngineError: it is not what it was, or its devices are others: it is of no use.
        """
        if dict(visible) != self._visible:
            raise EngineError("it was on other devices of its node, which a process cannot change")
        await self._engine.wake()
        if await self._probe() != self._before:
            raise EngineError("it does not answer as it did before it was parked")
        self.revision = revision
        return {"context_length": self._engine.context_length, "statistics": self.statistics()}

    async def _probe(self) -> tuple[int, ...]:
        """The tokens of an answer that depends on the weights and on nothing else."""
        sampling = SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.0, ignore_eos=True)
        found: list[int] = []
        async for delta in self._engine.generate(f"probe-{uuid.uuid4().hex}", PROBE, sampling):
            found += delta.token_ids
        return tuple(found)

    def statistics(self) -> dict[str, Any]:
        """The engine's."""
        return asdict(self._engine.statistics())

    async def prepare(self, spec: Mapping[str, Any]) -> None:
        """Get ready for another version of the model.

        Raises:
            WeightsError, ShoalError, OSError: it cannot be loaded in place of the one that there is.
        """
        path = await asyncio.to_thread(model_directory, AppSpec.from_json(spec))
        old = await asyncio.to_thread(model_directory, self.spec)
        await asyncio.to_thread(check_same_shapes, old, path)
        await asyncio.to_thread(read_ahead, path)

    async def load(self, spec: Mapping[str, Any], revision: int) -> None:
        """Go on with another version of the model; raises what `prepare` does, and goes on as it is then."""
        new = AppSpec.from_json(spec)
        path = await asyncio.to_thread(model_directory, new)
        prompts, sizes = await asyncio.to_thread(Prompts, path), EmbeddingSizes.of(path)
        await self._engine.load_weights(path)
        self.spec, self.revision, self._prompts = new, revision, prompts
        self._chat = chat_of(self._engine, prompts, new.config)
        self._embedding_sizes = sizes

    async def stop(self) -> None:
        """End all requests and free the model."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(EngineError):
            await self._engine.stop()
        self._gateways.stop()
        self._place.close()

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
