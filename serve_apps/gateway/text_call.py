"""Requests of the gateway that are answered in one piece; here those of text as the model's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from serve_apps.gateway.access import credential
from serve_apps.gateway.app_table import AppVersion
from serve_apps.gateway.backend import ReplicaLostError, raise_if_failed
from serve_apps.gateway.broken_engines import Suspect
from serve_apps.gateway.call import BODY_BYTES_WITHOUT_APPS
from serve_apps.gateway.choices import RETRIES
from serve_apps.gateway.reckoning import text_tokens
from serve_apps.gateway.service import GatewayService
from serve_apps.http.body import in_thread_if_large, read_body, read_json
from serve_apps.http.deadline import HEADER, Deadline
from serve_apps.http.event_stream import unless_gone
from serve_apps.http.request_record import current_record
from serve_apps.openai.answers import DetokenizeAnswer, TokenizeAnswer
from serve_apps.openai.chat_schema import Conversation
from serve_apps.openai.errors import (
    ApiError,
    body_too_large,
    engines_broke,
    replica_lost,
)
from serve_apps.openai.parse import check_tokenize, parse_fields
from serve_apps.openai.text_schema import (
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
)

Result = Mapping[str, Any]
Kind = TypeVar("Kind", bound=TextRequest)
Parsed = TypeVar("Parsed", bound=tuple[Any, ...])


class TextCall:
    """One request whose whole answer one replica, or several, give at once."""

    def __init__(self, service: GatewayService, http: HttpRequest) -> None:
        self._service = service
        self._http = http
        self._record = current_record()
        self._body = b""

    async def tokenize(self) -> Response:
        """Answer /tokenize, as vLLM does."""
        request, version = await self.read(TokenizeRequest)
        check_tokenize(request)

        def asks() -> list[dict[str, Any]]:
            how: dict[str, Any] = {"names": True} if request.return_token_strs else {}
            if request.add_special_tokens is not None:
                how["special_tokens"] = request.add_special_tokens
            if request.messages is None:
                return [{"prompt": request.prompt, **how}]
            messages = [message.for_template() for message in request.messages]
            return [{"messages": messages, "template": request.template(), **how}]

        (result,) = results = await self.ask(version, "tokenize", 1, asks)
        tokens = result["tokens"]
        self._record.tokenized = len(tokens)
        answer: TokenizeAnswer = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": version.context_length,
            "token_strs": result.get("token_strs"),
        }
        return JSONResponse(answer, headers=headers_of(results))

    async def detokenize(self) -> Response:
        """Answer /detokenize, as vLLM does."""
        request, version = await self.read(DetokenizeRequest)
        (result,) = results = await self.ask(
            version, "detokenize", 1, lambda: [{"tokens": list(request.tokens)}]
        )
        self._record.tokenized = len(request.tokens)
        answer: DetokenizeAnswer = {"prompt": result["prompt"]}
        return JSONResponse(answer, headers=headers_of(results))

    async def count(self, read: Callable[[Any, bool], Conversation], form: Callable[[int], Any]) -> Response:
        """Answer with the number of a conversation's tokens.

        Args:
            read: what the body asks, in the words of the API that the route is of.
            form: makes the answer.
        """
        (request,), version = await self.read_by(lambda document, ignore: (read(document, ignore),))
        (result,) = results = await self.ask(version, "tokenize", 1, request.prompts)
        self._record.tokenized = len(result["tokens"])
        return JSONResponse(form(len(result["tokens"])), headers=headers_of(results))

    async def tokenizer_info(self, model: str | None) -> Response:
        """Answer /tokenizer_info, as vLLM does."""
        version = await self._enter(lambda: _nothing(model))
        (result,) = results = await self.ask(version, "tokenizer_info", 1, lambda: [{}])
        return JSONResponse(result["info"], headers=headers_of(results))

    async def read(self, kind: type[Kind]) -> tuple[Kind, AppVersion]:
        """The request in the body, and the app that it asks."""
        (request,), version = await self.read_by(
            lambda document, ignore: (parse_fields(kind, document, ignore_unknown=ignore),)
        )
        return request, version

    async def read_by(self, read: Callable[[Any, bool], Parsed]) -> tuple[Parsed, AppVersion]:
        """What `read` makes of the body, a request first, and the app that this asks."""
        parsed: list[Parsed] = []

        async def model() -> str | None:
            table, ignore = self._service.table, self._service.options.ignore_unknown
            limit = (table.body_bytes if table else None) or BODY_BYTES_WITHOUT_APPS
            self._body = body = await read_body(self._http, limit)
            parsed.append(await in_thread_if_large(body, lambda: read(read_json(body), ignore)))
            named: str | None = parsed[0][0].model
            return named

        version = await self._enter(model)
        return parsed[0], version

    async def _enter(self, model: Callable[[], Awaitable[str | None]]) -> AppVersion:
        """Let the caller in, and find the app whose name `model` reads."""
        access, record = self._service.access, self._record
        self._caller = access.caller(credential(self._http.headers))
        record.tenant, record.stream = self._caller.tenant, False
        self._deadline = Deadline(record.began, self._http.headers.get(HEADER))
        async with self._deadline.enforced():
            name = await self._service.name(await model(), self._caller)
            version = await self._service.find(name, self._caller)
            record.app = name
            limits = version.spec.config.limits
            self._deadline.tighten(limits.request_timeout_s)
            if len(self._body) > limits.body_bytes:
                raise body_too_large(limits.body_bytes)
        return version

    async def ask(
        self,
        version: AppVersion,
        method: str,
        number: int,
        asks: Callable[[], list[dict[str, Any]]],
        expected: Callable[[], int] | None = None,
    ) -> list[Result]:
        """What the replicas of one version answer, in the order of the requests.

        Args:
            number: how many requests there are; they are made only when there is room for them.
            expected: reckons about how many tokens they have; None: as the body has it, which is text.
        """
        engine_id = self._record.engine_id()
        traffic, app = self._service.traffic, version.spec.name
        # Many inputs go in turn, so that they take no more places than an app has.
        at_once = min(number, version.spec.config.limits.batch)
        suspect = Suspect(traffic.broken, number)

        async def all_by(taker: AppVersion, named: list[dict[str, Any]]) -> list[Result]:
            turns = asyncio.Semaphore(at_once)

            async def in_turn(number: int, one: dict[str, Any]) -> Result:
                async with turns:
                    return await self._one(taker, method, number, one, suspect)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(in_turn(i, one)) for i, one in enumerate(named)]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [task.result() for task in tasks]

        async def all_of() -> list[Result]:
            requests = await in_thread_if_large(self._body, asks)
            named = [{"request_id": f"{engine_id}-{i}", **one} for i, one in enumerate(requests)]
            avoid: list[int] = []
            while True:
                taker = await traffic.take(app, at_once, avoid)
                try:
                    return await all_by(taker, named)
                except ApiError as error:
                    # Another version may do better, once.
                    if error.status < 500 or avoid or not traffic.other(app, taker):
                        raise
                    avoid.append(taker.revision)
                finally:
                    traffic.leave(taker, at_once)

        async with self._deadline.enforced():
            reckon = expected or (lambda: text_tokens(self._body))
            admission = await self._service.access.admit(self._caller, reckon)
        with admission:
            try:
                async with (
                    self._service.hold_places(version, at_once, "input"),
                    self._deadline.enforced(),
                ):
                    results = await unless_gone(self._http.receive, all_of())
            finally:
                suspect.end()
            starts = [result["start"] for result in results]
            self._record.ran_on(_replicas(results), starts[0]["model_version"])
            tokens = sum(start.get("prompt_tokens", 0) for start in starts)
            if method == "embed":
                self._record.prompt_tokens = tokens
            admission.settle(tokens)
        return results

    async def _one(
        self, version: AppVersion, method: str, number: int, request: Mapping[str, Any], suspect: Suspect
    ) -> Result:
        request = {**request, "revision": version.revision}
        traffic, runs = self._service.traffic, method == "embed"  # the others say nothing of the engine
        for retries_left in range(RETRIES, -1, -1):
            try:
                with suspect.sending(number, request) as sent:
                    result = await self._service.backend.ask(version.application, method, sent)
                    raise_if_failed(result)
                if runs:
                    traffic.answered(version)
                return result
            except ReplicaLostError as lost:
                error, broken = replica_lost(), lost.broken
            except ApiError as refused:
                error, broken = refused, None
            if broken is not None:
                traffic.broke(version, broken, suspect)
                if suspect.guilty:
                    raise engines_broke(version.spec.name, self._record.request_id)
            elif runs:
                traffic.refused(version, failed=error.status >= 500)
            if not (error.retry_elsewhere and retries_left):
                raise error
        raise AssertionError("the last try returns or raises")


async def _nothing(model: str | None) -> str | None:
    return model


def headers_of(results: Sequence[Result]) -> dict[str, str]:
    return {
        "x-shoal-replica": ",".join(_replicas(results)),
        "x-shoal-model-version": results[0]["start"]["model_version"],
    }


def _replicas(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result["start"]["replica"] for result in results))
