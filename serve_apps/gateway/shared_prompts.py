"""A long prompt that is to have several answers: tokenized once, refused once where it does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from serve_apps.gateway.app_table import AppVersion
from serve_apps.gateway.backend import ReplicaLostError
from serve_apps.openai.errors import ApiError
from serve_apps.replica.fit import check_fit, cut

LONG_CHARACTERS = 4096
"""What is shorter goes with each of its requests as it is, which costs less than asking first."""
_OF_PROMPT = ("prompt", "messages", "template", "special_tokens")
"""Fields of a request that say which tokens its prompt has."""


Tokenize = Callable[[AppVersion, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Asks a replica of a version for a prompt's tokens: what it returns, see `Replica.tokenize`."""


async def tokenized_once(
    tokenize: Tokenize, version: AppVersion, requests: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The requests to a version; those that share a long text have its tokens in its place.

    Without it, 128 answers to a text of 4 MB that no context holds would be 512 MB on their way to replicas
    and as much to tokenize, before each is refused.

    Raises:
        ApiError: a text does not fit in the model's context, or cannot be tokenized.
    """
    if len(requests) == 1:
        return list(requests)
    sharing: defaultdict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        # `plan` gives all answers to one prompt the same object.
        sharing[id(request["messages"] if "messages" in request else request["prompt"])].append(number)
    made = list(requests)
    for numbers in sharing.values():
        first = requests[numbers[0]]
        if len(numbers) > 1 and _characters(first) >= LONG_CHARACTERS:
            tokens = await _tokens(tokenize, version, first)
            for number in numbers if tokens is not None else ():
                kept = {k: v for k, v in requests[number].items() if k not in ("messages", "template")}
                made[number] = {**kept, "prompt": tokens}
    return made


async def _tokens(tokenize: Tokenize, version: AppVersion, request: Mapping[str, Any]) -> list[int] | None:
    """The tokens of a request's prompt; None where its replica failed, which the answers may survive."""
    asked = {name: request[name] for name in _OF_PROMPT if name in request}
    named = {"request_id": f"{request['request_id']}-tokens", "revision": version.revision, **asked}
    try:
        result = await tokenize(version, named)
    except ReplicaLostError:
        return None
    except ApiError as error:
        if error.status >= 500:
            return None
        raise
    tokens: list[int] = result["tokens"]
    param = "messages" if "messages" in request else "prompt"
    tokens = cut(tokens, request, version.context_length, request["max_tokens"])
    check_fit(len(tokens), version.context_length, request["max_tokens"], param)
    return tokens


def _characters(request: Mapping[str, Any]) -> int:
    """Of its text; 0 of token ids."""
    if "messages" in request:
        return sum(len(str(message)) for message in request["messages"])
    prompt = request["prompt"]
    return len(prompt) if isinstance(prompt, str) else 0
