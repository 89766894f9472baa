"""How one model's answers are read: which parsers, and what they are told of a request."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any

from serve_apps.openai.errors import bad_request
from serve_apps.parsing.answer_parser import AnswerParser
from serve_apps.parsing.json_calls import CallList, NamedCall
from serve_apps.parsing.parts import Function, Parser
from serve_apps.parsing.table import TOOL_PARSERS, reasoning_of, tools_of
from serve_apps.parsing.thinking import BEGIN, END, Thinking

_CHARACTERS = string.ascii_letters + string.digits
_SHORT_ID = 9
"""Characters of a call's id in the templates of Mistral's models, which refuse any other."""


class AnswerReading:
    """The parsers for the answers of one model.

    Args:
        template: the text of the model's chat template, which says what the app's config does not.
        tools: a name of TOOL_PARSERS; `none` for no parser, None for the template's.
        reasoning: a name of REASONING_PARSERS; `none` and None as above.
    """

    def __init__(self, template: str, tools: str | None, reasoning: str | None) -> None:
        self._tools = tools_of(template) if tools is None else None if tools == "none" else tools
        found = reasoning_of(template) if reasoning is None else reasoning
        self._reasoning = None if found == "none" else found

    @property
    def marks(self) -> tuple[str, ...]:
        """What the parsers look for, and has to be shown to them where it is a special token."""
        calls = TOOL_PARSERS[self._tools].MARKS if self._tools is not None else ()
        return (*calls, *(Thinking.MARKS if self._reasoning is not None else ()))

    def parser(self, asked: Mapping[str, Any], prompt_end: str) -> AnswerParser | None:
        """The parser of one answer; None where all of it is words.

        Args:
            asked: see `ChatRequest.reading`.
            prompt_end: the last characters of the prompt.

        Raises:
            ApiError: 400, the request leaves calls to the model, and nothing here can read them.
        """
        reasoning = self._reads_reasoning(prompt_end)
        calls = self._reads_calls(asked)
        if reasoning is None and calls is None:
            return None
        return AnswerParser(
            reasoning,
            calls,
            self._new_id,
            parallel=asked.get("parallel", True),
            hide_reasoning=asked.get("hide_reasoning", False),
        )

    def _reads_reasoning(self, prompt_end: str) -> Thinking | None:
        if self._reasoning is None:
            return None
        end = prompt_end.rstrip()
        if self._reasoning == "qwen3":
            return Thinking(open=end.endswith(BEGIN))
        return Thinking(open=not end.endswith(END))

    def _reads_calls(self, asked: Mapping[str, Any]) -> Parser | None:
        if "functions" not in asked:
            return None
        if asked["mode"] == "named":
            return NamedCall(asked["name"])
        if asked["mode"] == "required":
            return CallList()
        if self._tools is None:
            raise bad_request(
                "This model's calls of tools cannot be read: its chat template shows no format that is known."
                " Set `tools` of the app, or ask with tool_choice 'required'.",
                param="tools",
                code="tools_not_supported",
            )
        functions = [Function(one["name"], one.get("parameters") or {}) for one in asked["functions"]]
        return TOOL_PARSERS[self._tools](functions)

    def _new_id(self) -> str:
        if self._tools == "mistral":
            return "".join(secrets.choice(_CHARACTERS) for _ in range(_SHORT_ID))
        return f"call_{secrets.token_hex(12)}"
