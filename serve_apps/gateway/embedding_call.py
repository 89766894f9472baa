"""Requests of the gateway for embeddings, and for how alike texts are by them."""

from __future__ import annotations

import base64
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from serve_apps.gateway.app_table import AppVersion
from serve_apps.gateway.reckoning import prompt_tokens
from serve_apps.gateway.text_call import Result, TextCall, headers_of
from serve_apps.openai.answers import (
    EmbeddingAnswer,
    EmbeddingUsage,
    PoolingAnswer,
    RerankAnswer,
    RerankResult,
    ScoreAnswer,
)
from serve_apps.openai.errors import ApiError, too_long
from serve_apps.openai.parse import parse_score
from serve_apps.openai.text_schema import EmbeddingRequest, PoolingRequest, RerankRequest, ScoringRequest
from serve_apps.replica.fit import cut_to


class EmbeddingCall(TextCall):
    """One POST that is answered by embeddings."""

    async def embeddings(self) -> Response:
        """Answer /v1/embeddings."""
        request, version = await self.read(EmbeddingRequest)
        results = await self._embed(request, version)
        answer: EmbeddingAnswer = {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(result["embedding"], request.encoding_format),
                }
                for index, result in enumerate(results)
            ],
            "model": version.spec.name,
            "usage": _usage(results),
        }
        return JSONResponse(answer, headers=headers_of(results))

    async def pooling(self) -> Response:
        """Answer /pooling, as vLLM does for models that embed."""
        request, version = await self.read(PoolingRequest)
        results = await self._embed(request, version)
        answer: PoolingAnswer = {
            "id": f"pool-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": version.spec.name,
            "data": [
                {
                    "object": "pooling",
                    "index": index,
                    "data": _encoded(result["embedding"], request.encoding_format),
                }
                for index, result in enumerate(results)
            ],
            "usage": _usage(results),
        }
        return JSONResponse(answer, headers=headers_of(results))

    async def score(self) -> Response:
        """Answer /score: how alike the texts of each pair are, by their embeddings."""
        (request, first, second), version = await self.read_by(parse_score)
        results = await self._embed_texts(version, request, first, second)
        values = cosines([result["embedding"] for result in results], len(first))
        answer: ScoreAnswer = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": version.spec.name,
            "data": [{"object": "score", "index": i, "score": value} for i, value in enumerate(values)],
            "usage": _usage(results),
        }
        return JSONResponse(answer, headers=headers_of(results))

    async def rerank(self) -> Response:
        """Answer /rerank: the documents that are most like a query, by their embeddings."""
        request, version = await self.read(RerankRequest)
        results = await self._embed_texts(version, request, [request.query], request.documents)
        values = cosines([result["embedding"] for result in results], 1)
        ranked = sorted(range(len(values)), key=lambda index: -values[index])
        found: list[RerankResult] = []
        for index in ranked[: request.top_n or None]:
            one: RerankResult = {"index": index, "relevance_score": values[index]}
            if request.return_documents is not False:
                one["document"] = {"text": request.documents[index]}
            found.append(one)
        answer: RerankAnswer = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": version.spec.name,
            "usage": _usage(results),
            "results": found,
        }
        return JSONResponse(answer, headers=headers_of(results))

    async def _embed(self, request: EmbeddingRequest, version: AppVersion) -> list[Result]:
        context = version.context_length
        most = cut_to(request.truncate_prompt_tokens, context, 0)
        for prompt in request.input:
            if not isinstance(prompt, str) and len(prompt) > context and (most is None or most > context):
                raise too_long(len(prompt), context, None, "input")
        try:
            return await self.ask(
                version, "embed", len(request.input), request.asks, lambda: prompt_tokens(request.input)
            )
        except ApiError as error:
            # What the replica knows as the prompt.
            error.param = "input" if error.param == "prompt" else error.param
            raise

    async def _embed_texts(
        self, version: AppVersion, request: ScoringRequest, first: Sequence[str], second: Sequence[str]
    ) -> list[Result]:
        """The embeddings of some texts, and of those that they are compared with."""

        def asks() -> list[dict[str, Any]]:
            cut_second = request.cut_document(version.context_length)
            return [
                *({"prompt": text, **request.cut()} for text in first),
                *({"prompt": text, **cut_second} for text in second),
            ]

        return await self.ask(version, "embed", len(first) + len(second), asks)


def _encoded(values: Sequence[float], encoding: str | None) -> Any:
    if encoding != "base64":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def cosines(embeddings: Sequence[Sequence[float]], num_first: int) -> list[float]:
    """Of each embedding after the first ones, the cosine of its angle to that of its number among those.

    Where there is one of those, all are compared with it.
    """
    import numpy as np

    table = np.asarray(embeddings)
    table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    values: list[float] = (table[:num_first] * table[num_first:]).sum(axis=1).tolist()
    return values


def _usage(results: Sequence[Result]) -> EmbeddingUsage:
    tokens = sum(result["start"]["prompt_tokens"] for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
