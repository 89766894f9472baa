"""From a request of OpenAI's API to the requests that replicas answer, one for each choice."""

from __future__ import annotations

from typing import Any

from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.schema import CompletionRequest, Request


def replica_requests(request: Request, request_id: str, most_tokens: int | None) -> list[dict[str, Any]]:
    """The requests to replicas that answer a client's request, in the order of its choices.

    Args:
        most_tokens: of each answer; None: as many as there is room for.
    """
    prompts: list[dict[str, Any]]
    if isinstance(request, ChatRequest):
        messages = [message.for_template() for message in request.messages]
        prompts = [{"messages": messages, "template": request.template(), "reading": request.reading()}]
    else:
        assert isinstance(request, CompletionRequest)
        prompts = [{"prompt": prompt} for prompt in request.prompt]
    sampling = request.sampling()
    requests: list[dict[str, Any]] = []
    for prompt in prompts:
        for number in range(request.choices_each):
            seed = None if request.seed is None else (request.seed + number + 2**63) % 2**64 - 2**63
            requests.append(
                {
                    "request_id": f"{request_id}-{len(requests)}",
                    **prompt,
                    "streamed": request.streamed,
                    "priority": request.priority or 0,
                    "max_tokens": most_tokens,
                    # The same seed for all would make all choices of a prompt the same.
                    "sampling": {**sampling, "seed": seed},
                }
            )
    return requests
