"""Which parser reads which model's answers: by the app's config, or by the model's own chat template."""

from __future__ import annotations

from serve_apps.parsing.hermes import Hermes
from serve_apps.parsing.llama3_json import Llama3Json
from serve_apps.parsing.mistral import Mistral
from serve_apps.parsing.parts import ToolParser
from serve_apps.parsing.pythonic import Pythonic
from serve_apps.parsing.qwen3_coder import Qwen3Coder

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
}
"""By the names of vLLM's `--tool-call-parser`."""
REASONING_PARSERS = ("deepseek_r1", "qwen3")
"""By the names of vLLM's `--reasoning-parser`; models of the first kind leave the opening mark out."""


def tools_of(template: str) -> str | None:
    """The parser for the calls that a chat template teaches; None where it is not plain."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<arg_key>" not in template:
        if "<function=" in template:
            return "qwen3_coder"
        return "hermes" if "name" in template and "arguments" in template else None
    if "func_name1(params_name1=" in template:
        return "pythonic"
    if '"parameters": dictionary of argument' in template or "<|python_tag|>" in template:
        return "llama3_json"
    return None


def reasoning_of(template: str) -> str | None:
    """The parser for the reasoning that a chat template knows; None where it knows none."""
    return "qwen3" if "</think>" in template else None
