"""One generating request of the gateway, from its body to the end of its answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_apps.app_table import AppVersion
from serve_apps.choices import Event, Run, plan
from serve_apps.deadline import HEADER, Deadline
from serve_apps.event_stream import EventStream, sse_event, unless_gone
from serve_apps.fit import check_fit
from serve_apps.gateway_service import GatewayService
from serve_apps.openai_errors import ApiError, body_too_large, too_many_tokens
from serve_apps.openai_format import Format, Gathered, usage
from serve_apps.openai_schema import CompletionRequest
from serve_apps.openai_schema import Request as ModelRequest
from serve_apps.request_body import in_thread_if_large, read_body, read_json
from serve_apps.request_fields import parse
from serve_apps.request_log import current_record

BODY_BYTES_WITHOUT_APPS = 64 * 1024


class Call:
    """One POST that generates, from its body to the end of its answer."""

    def __init__(
        self, service: GatewayService, http: Request, kind: type[ModelRequest], format_class: type[Format]
    ) -> None:
        self._service = service
        self._http = http
        self._kind = kind
        self._format_class = format_class
        self._record = current_record()

    async def answer(self) -> Response:
        access = self._service.access
        self._caller = access.caller(self._http.headers.get("authorization", ""))
        self._record.tenant = self._caller.tenant
        self._deadline = Deadline(self._record.began, self._http.headers.get(HEADER))
        table = self._service.table
        limit = (table.body_bytes if table else None) or BODY_BYTES_WITHOUT_APPS
        async with self._deadline.enforced():
            body = await read_body(self._http, limit)
            request = await in_thread_if_large(body, lambda: parse(self._kind, read_json(body)))
            self._record.stream = request.streamed
            version = await self._service.find(request.model, self._caller)
            self._record.app = request.model
            self._deadline.tighten(version.spec.config.limits.request_timeout_s)
            self._check(request, version, len(body))
            await access.admit(self._caller)
        self._id = f"{self._format_class.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices_each = request.choices_each
        async with AsyncExitStack() as stack:
            # Before anything is made of the request: one of a few bytes can ask for many answers.
            many = "n" if request.choices_each > 1 else "prompt"
            stack.enter_context(self._service.places(version, request.num_choices, many))
            self._format: Format = self._format_class(request.num_choices, request.alternatives is not None)
            self._gathered = Gathered(request.num_choices)
            self._last_seen_s = 0.0
            self._run = Run(
                self._service.backend,
                self._service.traffic,
                request.model,
                await in_thread_if_large(body, lambda: plan(request, self._record.engine_id())),
                restartable=not request.streamed,
                timeout_s=self._deadline.left_s(),
            )
            stack.push_async_callback(self._spend)
            await stack.enter_async_context(self._run)
            events = self._run.events()
            try:
                if not request.streamed:
                    await unless_gone(self._http.receive, self._gather(events))
                    return JSONResponse(self._document(request.model), headers=self._headers())
                # Nothing is sent before the first tokens: until then another replica can take over.
                first = await unless_gone(self._http.receive, anext(events))
            except ApiError as error:
                error = self._deadline.restated(error)
                error.headers.update(self._headers())
                raise error from None
            parts = self._stream(request, first, events)
            return EventStream(parts, self._headers(), stack.pop_all())

    async def _spend(self) -> None:
        """Note what the request took, however it ended, and count its tokens for its tenant."""
        record, tokens = self._record, 0
        record.ran_on(self._run.replicas, self._run.model_version)
        if record.first_token_s is not None:
            used = self._usage()
            record.prompt_tokens, record.completion_tokens = used["prompt_tokens"], used["completion_tokens"]
            tokens = used["total_tokens"]
            longest = max(self._gathered.tokens)
            if record.stream and longest > 1:
                record.output_token_s = (self._last_seen_s - record.first_token_s) / (longest - 1)
        await self._service.access.spend(self._caller, tokens)

    def _check(self, request: ModelRequest, version: AppVersion, body_bytes: int) -> None:
        limits = version.spec.config.limits
        if body_bytes > limits.body_bytes:
            raise body_too_large(limits.body_bytes)
        if request.most_tokens is not None and request.most_tokens > limits.max_tokens:
            raise too_many_tokens(request.most_tokens, request.model, limits.max_tokens)
        for prompt in request.prompt if isinstance(request, CompletionRequest) else ():
            if not isinstance(prompt, str):
                check_fit(len(prompt), version.context_length, request.most_tokens, "prompt")

    async def _gather(self, events: AsyncIterator[Event]) -> None:
        async for event in events:
            self._seen()
            self._gathered.add(event)

    def _seen(self) -> None:
        record = self._record
        self._last_seen_s = record.seconds()
        if record.first_token_s is None:
            record.first_token_s = self._last_seen_s
            self._service.traffic.first_token(record.app, record.first_token_s)

    def _document(self, model: str) -> dict[str, Any]:
        choices = [self._format.choice(i, self._gathered) for i in range(len(self._gathered.text))]
        return {**self._head(self._format.whole, model), "choices": choices, "usage": self._usage()}

    async def _stream(
        self, request: ModelRequest, first: Event, events: AsyncIterator[Event]
    ) -> AsyncIterator[bytes]:
        """Server-sent events; the last is [DONE], or an error."""
        head = self._head(self._format.part, request.model)
        if request.include_usage:
            head["usage"] = None
        opened: set[int] = set()

        def parts(event: Event) -> bytes:
            self._seen()
            # Of what is sent on, only the number is kept.
            self._gathered.tokens[event.index] += len(event.item["token_ids"])
            entries = self._format.chunks(event)
            if event.index not in opened:
                opened.add(event.index)
                opening = self._format.opening(event.index)
                entries = [opening, *entries] if opening else entries
            return b"".join(sse_event({**head, "choices": [entry]}) for entry in entries)

        yield parts(first)
        try:
            async for event in events:
                yield parts(event)
        except ApiError as error:
            raise self._deadline.restated(error) from None
        if request.include_usage:
            yield sse_event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _usage(self) -> dict[str, int]:
        # The choices of one prompt read it once; they stand side by side in the order of the prompts.
        run = self._run
        prompts = (n for i, n in run.prompt_tokens.items() if i % self._choices_each == 0)
        return usage(prompts, sum(self._gathered.tokens))

    def _headers(self) -> dict[str, str]:
        run = self._run
        if run.model_version is None:
            return {}
        return {"x-shoal-replica": ",".join(run.replicas), "x-shoal-model-version": run.model_version}
