"""The clients: which package, in which version, how it is installed, and what it can be asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BASIC = ("chat", "stream", "structured", "tools", "history")
"""What a client does, as far as it can: one answer; one in pieces; one by a JSON schema; a call of a tool,
its result and the answer to it; a conversation handed back as the client keeps it."""

PYTHON_PACKAGES: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0",),
    "anthropic": ("anthropic==2.14.0",),
    "langchain": ("langchain-openai==1.7.4",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "litellm": ("litellm==1.110.2",),
    # The extra of later ones names releases that PyPI does not have (litellm-proxy, litellm-proxy-extras).
    "litellm_proxy": ("litellm[proxy]==1.106.12",),
    "instructor": ("instructor==1.17.0",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.66.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "llm": ("llm==0.36",),
    "aider": ("aider-chat==0.86.2",),
    "guidellm": ("guidellm==0.8.1",),
    # It measures the model by itself too, with the project's own transformers.
    "lm_eval": ("lm-eval[api,hf]==0.4.13", "torch>=2.13,<2.14", "transformers>=5.19,<6"),
}
"""By environment: each has a virtual environment of its own, since they do not agree on what they need.

The versions of npm's packages are in `node/package.json`; `node` itself is one of them.
"""


@dataclass(frozen=True)
class Client:
    """A program in `programs/`, run as a user would run it."""

    program: str
    environment: str | None
    """One of PYTHON_PACKAGES; None: what npm installed."""
    cases: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


CLIENTS: dict[str, Client] = {
    "openai-python": Client(
        "openai_python.py",
        "openai",
        (
            *(*BASIC, "stream_helper", "asynchronous", "streamed_tools", "parallel_tools"),
            *("required_tool", "named_tool", "text_before_tools"),
        ),
    ),
    "openai-node": Client("openai_node.mjs", None, (*BASIC, "stream_helper", "streamed_tools", "named_tool")),
    "openai-responses": Client("openai_responses.py", "openai", (*BASIC, "streamed_tools", "named_tool")),
    **{
        f"ai-sdk-{model}": Client(
            "ai_sdk.mjs",
            None,
            (*BASIC, "streamed_structured", "streamed_tools", "named_tool"),
            {"AI_SDK_MODEL": model},
        )
        for model in ("compatible", "chat", "responses")
    },
    "anthropic": Client("anthropic_messages.py", "anthropic", (*BASIC, "streamed_tools", "named_tool")),
    "langchain": Client(
        "langchain_openai_chat.py", "langchain", (*BASIC, "asynchronous", "streamed_tools", "named_tool")
    ),
    "llama-index": Client("llama_index_chat.py", "llama_index", (*BASIC, "agent")),
    "litellm": Client(
        "litellm_completion.py", "litellm", (*BASIC, "asynchronous", "streamed_tools", "named_tool")
    ),
    "instructor": Client(
        "instructor_chat.py", "instructor", ("structured", "structured_json", "stream_object", "named_tool")
    ),
    "pydantic-ai": Client("pydantic_ai_agent.py", "pydantic_ai", (*BASIC, "streamed_tools")),
    **{
        f"openai-agents-{api}": Client(
            "openai_agents.py", "openai_agents", (*BASIC, "streamed_tools"), {"AGENTS_API": api}
        )
        for api in ("chat_completions", "responses")
    },
    "smolagents": Client("smolagents_agent.py", "smolagents", (*BASIC, "streamed_tools")),
}
