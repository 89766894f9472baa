"""Probe requests: a new version answers them before it gets a request of anybody's."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import TYPE_CHECKING, Any

from serve_apps.controller.record import Revision

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

PROBE_TOKENS = 4
"""Tokens of an answer to a probe."""


async def probe(revision: Revision, handle: DeploymentHandle[Any]) -> str:
    """Ask a revision each of its app's probes; what was wrong with an answer, empty if nothing was.

    Args:
        handle: to the replicas of the revision's application.
    """
    config = revision.spec.config
    try:
        for text in config.update.probes:
            request = {
                "request_id": f"shoal-probe-{uuid.uuid4().hex}",
                "prompt": text,
                "max_tokens": min(PROBE_TOKENS, config.limits.max_tokens or PROBE_TOKENS),
                "streamed": False,
                "sampling": {"temperature": 0.0, "logprobs": 0},
                "revision": revision.number,
            }
            async with asyncio.timeout(config.update.probe_timeout_s):
                answer = await handle.generate.remote(request)
            if wrong := judge(answer):
                return f"asked {text!r}, {wrong}"
    except TimeoutError:
        return f"no answer within {config.update.probe_timeout_s:g} s"
    except Exception as error:  # noqa: BLE001 - a replica's exceptions are of any kind
        return f"{error}"
    return ""


def judge(answer: dict[str, Any]) -> str:
    """What is wrong with the answer to a probe; empty if nothing is."""
    if "error" in answer:
        return f"it answered: {answer['error']['message']}"
    if not answer.get("token_ids") and answer.get("finish_reason") != "stop":
        return "it answered nothing"
    if not all(math.isfinite(logprob) for _, _, logprob, _ in answer.get("logprobs", ())):
        return "its probabilities are not finite numbers"
    return ""
