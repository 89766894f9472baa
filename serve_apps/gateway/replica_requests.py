"""From a request of OpenAI's API to the requests that replicas answer, one for each choice."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from serve_apps.openai.schema import CompletionRequest, Request


def replica_requests(
    request: Request, request_id: str, most_tokens: int | None, tenant: str | None = None
) -> list[dict[str, Any]]:
    """The requests to replicas that answer a client's request, in the order of its choices.

    Args:
        most_tokens: of each answer; None: as many as there is room for.
        tenant: whose it is; None: of a gateway without keys.
    """
    sampling, options = request.sampling(), request.prompt_options()
    salt = cache_salt(tenant, request.cache_salt)
    requests: list[dict[str, Any]] = []
    for prompt in request.prompts():
        for number in range(request.choices_each):
            seed = None if request.seed is None else (request.seed + number + 2**63) % 2**64 - 2**63
            requests.append(
                {
                    "request_id": f"{request_id}-{len(requests)}",
                    **prompt,
                    **options,
                    "streamed": request.streamed,
                    "priority": request.priority or 0,
                    "max_tokens": most_tokens,
                    **({"cache_salt": salt} if salt else {}),
                    # The same seed for all would make all choices of a prompt the same.
                    "sampling": {**sampling, "seed": seed},
                }
            )
    return requests


def prompt_heading(request: Request) -> dict[str, Any]:
    """The fields of an answer's Heading that say what it is to tell of prompts and of tokens."""
    texts: list[str | None] = []
    if request.echoes:
        assert isinstance(request, CompletionRequest)
        kept = request.truncate_prompt_tokens is None
        own = [prompt if kept and isinstance(prompt, str) else None for prompt in request.prompt]
        texts = [text for text in own for _ in range(request.choices_each)]
    return {
        "echo": request.echoes,
        "prompts": texts,
        "with_prompt_logprobs": request.prompt_logprobs is not None,
        "with_token_ids": bool(request.return_token_ids),
        "with_special_tokens": request.skip_special_tokens is False,
    }


def cache_salt(tenant: str | None, given: str | None) -> str:
    """What keeps a tenant's prompts apart from the others' in engines' prefix caches; empty: nothing does.

    How fast an answer begins tells whether its prompt was in the cache, and so what somebody else has asked.

    Args:
        given: what the request names itself; it sets the tenant's own requests apart from one another.
    """
    if tenant is None and given is None:
        return ""
    return blake2b(json.dumps([tenant, given]).encode(), digest_size=16).hexdigest()
