"""One generating request of the gateway, from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_apps.gateway.access import credential
from serve_apps.gateway.app_table import AppVersion
from serve_apps.gateway.choices import Choices
from serve_apps.gateway.reckoning import expected_tokens
from serve_apps.gateway.replica_requests import prompt_heading, replica_requests
from serve_apps.gateway.service import GatewayService
from serve_apps.http.behind_front import SENT
from serve_apps.http.body import in_thread_if_large, read_body, read_json
from serve_apps.http.deadline import HEADER, Deadline
from serve_apps.http.event_stream import SILENCE, EventStream, ended, sse_event, unless_gone, wait_unless_gone
from serve_apps.http.request_record import current_record
from serve_apps.openai.answers import Usage
from serve_apps.openai.asked import Read
from serve_apps.openai.errors import ApiError, body_too_large
from serve_apps.openai.format import ChoiceEvent, Gathered, Heading, usage
from serve_apps.openai.schema import CompletionRequest
from serve_apps.openai.schema import Request as ModelRequest
from serve_apps.replica.fit import check_fit, cut_to, most_tokens

BODY_BYTES_WITHOUT_APPS = 64 * 1024


class Call:
    """One POST that generates, from its body to the end of its answer.

    Args:
        read: what the body asks, in the words of the API that the route is of.
    """

    def __init__(self, service: GatewayService, http: Request, read: Read) -> None:
        self._service = service
        self._http = http
        self._read = read
        self._record = current_record()

    async def answer(self) -> Response:
        access = self._service.access
        self._caller = access.caller(credential(self._http.headers))
        self._record.tenant = self._caller.tenant
        self._deadline = Deadline(self._record.began, self._http.headers.get(HEADER))
        table = self._service.table
        limit = (table.body_bytes if table else None) or BODY_BYTES_WITHOUT_APPS
        async with self._deadline.enforced():
            body = await read_body(self._http, limit)
            ignore = self._service.options.ignore_unknown
            asked = await in_thread_if_large(body, lambda: self._read(read_json(body), ignore))
            request = asked.request
            self._record.stream = request.streamed
            version = await self._service.find(request.model, self._caller)
            self._record.app = request.model
            self._deadline.tighten(version.spec.config.limits.request_timeout_s)
            most = self._check(request, version, len(body))
            once = self._service.repeats.once(
                self._http.headers,
                self._http.scope.get(SENT),
                self._caller.tenant,
                self._http.url.path,
                body,
                time.time(),
                streamed=request.streamed,
            )
            self._admission = await access.admit(self._caller, lambda: expected_tokens(request, most, body))
        self._choices_each = request.choices_each
        self._continuous_usage = request.continuous_usage
        async with AsyncExitStack() as stack:
            stack.enter_context(self._admission)
            # Before anything is made of the request: one of a few bytes can ask for many answers.
            many = "n" if request.choices_each > 1 else "prompt"
            await stack.enter_async_context(self._service.hold_places(version, request.num_choices, many))
            heading = Heading(
                id=uuid.uuid4().hex,
                created=int(time.time()),
                model=request.model,
                num_choices=request.num_choices,
                with_logprobs=request.alternatives is not None,
                with_usage=request.include_usage,
                **prompt_heading(request),
            )
            self._format = asked.format(heading)
            self._gathered = Gathered(request.num_choices)
            self._last_seen_s = 0.0
            self._choices = Choices(
                self._service.backend,
                self._service.traffic,
                request.model,
                await in_thread_if_large(
                    body,
                    lambda: replica_requests(
                        request,
                        self._record.engine_id(),
                        most,
                        self._caller.tenant if self._caller.key else None,
                    ),
                ),
                once=once,
                restartable=not request.streamed,
                timeout_s=self._deadline.left_s(),
            )
            self._admission.taken = lambda: self._usage()["total_tokens"]
            stack.callback(self._settle)
            await stack.enter_async_context(self._choices)
            events = self._choices.events()
            try:
                if not request.streamed:
                    await unless_gone(self._http.receive, self._gather(events))
                    answer = self._format.answer(self._gathered, self._usage())
                    return JSONResponse(answer, headers=self._headers())
                # An error that comes before anything is sent has a status; who waits longer than proxies do
                # is sent comments, and then the error is an event.
                first = asyncio.ensure_future(anext(events))
                stack.push_async_callback(ended, first)
                keepalive_s = self._service.options.keepalive_s
                await wait_unless_gone(self._http.receive, first, keepalive_s or None)
                if first.done():
                    first.result()
            except ApiError as error:
                error = self._deadline.restated(error)
                error.param = asked.fields.get(error.param or "", error.param)
                error.headers.update(self._headers())
                raise error from None
            parts = self._stream(first, events)
            # Before its first tokens another replica can still take it over.
            headers = self._headers() if first.done() else {}
            return EventStream(parts, headers, stack.pop_all(), self._failure, keepalive_s)

    def _settle(self) -> None:
        """Note what the request took, however it ended, and count its tokens for its tenant."""
        record, tokens = self._record, 0
        record.ran_on(self._choices.replicas, self._choices.model_version)
        if record.first_token_s is not None:
            used = self._usage()
            record.prompt_tokens, record.completion_tokens = used["prompt_tokens"], used["completion_tokens"]
            tokens = used["total_tokens"]
            longest = max(self._gathered.tokens)
            if record.stream and longest > 1:
                record.output_token_s = (self._last_seen_s - record.first_token_s) / (longest - 1)
        self._admission.settle(tokens)

    def _check(self, request: ModelRequest, version: AppVersion, body_bytes: int) -> int | None:
        """Refuse what can be seen to be too much; returns the most tokens of each answer, None for any."""
        limits = version.spec.config.limits
        if body_bytes > limits.body_bytes:
            raise body_too_large(limits.body_bytes)
        most = most_tokens(request, limits)
        context = version.context_length
        cut = cut_to(request.truncate_prompt_tokens, context, most)
        for prompt in request.prompt if isinstance(request, CompletionRequest) else ():
            if not isinstance(prompt, str):
                check_fit(len(prompt) if cut is None else min(cut, len(prompt)), context, most, "prompt")
        return most

    async def _gather(self, events: AsyncIterator[ChoiceEvent]) -> None:
        async for event in events:
            self._seen()
            self._gathered.add(event)

    def _seen(self) -> None:
        record = self._record
        self._last_seen_s = record.seconds()
        if record.first_token_s is None:
            record.first_token_s = self._last_seen_s
            self._service.traffic.first_token(record.app, record.first_token_s)

    def _sent(self, chunks: Iterable[Mapping[str, object]]) -> bytes:
        named = self._format.NAMED_EVENTS
        return b"".join(sse_event(chunk, str(chunk["type"]) if named else None) for chunk in chunks)

    def _failure(self, error: ApiError) -> bytes:
        return self._sent([self._format.failure(error)])

    async def _stream(
        self, first: asyncio.Future[ChoiceEvent], events: AsyncIterator[ChoiceEvent]
    ) -> AsyncIterator[bytes]:
        """Server-sent events; the last says that the answer is whole, or is an error."""
        if not first.done():
            yield SILENCE  # nobody on the way has heard of an answer yet

        def parts(event: ChoiceEvent) -> bytes:
            self._seen()
            # Of what is sent on, only the number is kept.
            self._gathered.count(event)
            chunks = self._format.chunks(event)
            if self._continuous_usage:
                used = self._usage()
                chunks = [{**chunk, "usage": used} for chunk in chunks]
            return self._sent(chunks)

        try:
            event = await first
            yield self._sent(self._format.opening(self._usage())) + parts(event)
            async for event in events:
                yield parts(event)
        except ApiError as error:
            raise self._deadline.restated(error) from None
        done = b"" if self._format.NAMED_EVENTS else b"data: [DONE]\n\n"
        yield self._sent(self._format.ending(self._usage())) + done

    def _usage(self) -> Usage:
        # The choices of one prompt read it once; they stand side by side in the order of the prompts.
        choices = self._choices
        prompts = (n for i, n in choices.prompt_tokens.items() if i % self._choices_each == 0)
        cached = [n for i, n in choices.cached_tokens.items() if i % self._choices_each == 0]
        return usage(prompts, self._gathered, sum(cached) if cached else None)

    def _headers(self) -> dict[str, str]:
        choices = self._choices
        if choices.model_version is None:
            return {}
        return {"x-shoal-replica": ",".join(choices.replicas), "x-shoal-model-version": choices.model_version}
