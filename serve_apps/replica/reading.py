"""How one model's answers are read: which parsers, and how answers are held so that these can read them."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from serve_apps.engine.protocol import STRUCTURES
from serve_apps.openai.errors import bad_request
from serve_apps.openai.tools import schema_or_calls
from serve_apps.parsing.answer_parser import AnswerParser
from serve_apps.parsing.json_calls import CallList, NamedCall
from serve_apps.parsing.parser_table import TOOL_PARSERS, reasoning_of, tools_of
from serve_apps.parsing.parts import Function, Parser
from serve_apps.parsing.thinking import BEGIN, END, Thinking

_CHARACTERS = string.ascii_letters + string.digits
_SHORT_ID = 9
"""Characters of a call's id in the templates of Mistral's models, which refuse any other."""


class AnswerReading:
    """The parsers for the answers of one model, and how its answers are held to be readable.

    Args:
        template: the text of the model's chat template, which says what the app's config does not.
        tools: a name of TOOL_PARSERS; `none` for no parser, None for the template's.
        reasoning: a name of REASONING_PARSERS; `none` and None as above.
        tokens: the token that a text is all of, by its text; None where there is none.
        special_tokens: texts that the engine leaves out of answers, unless it is told to show them.
    """

    def __init__(
        self,
        template: str,
        tools: str | None,
        reasoning: str | None,
        tokens: Callable[[str], int | None] = lambda text: None,
        special_tokens: Collection[str] = (),
    ) -> None:
        self.tools = tools_of(template) if tools is None else None if tools == "none" else tools
        found = reasoning_of(template) if reasoning is None else reasoning
        self.reasoning = None if found == "none" else found
        self._token = tokens
        calls = TOOL_PARSERS[self.tools].MARKS if self.tools in TOOL_PARSERS else ()
        marks = {*calls, *(Thinking.MARKS if self.reasoning is not None else ())}
        self._shows = not marks.isdisjoint(special_tokens)
        others = sorted(set(special_tokens) - marks, key=len, reverse=True)
        self._unseen = re.compile("|".join(map(re.escape, others))) if self._shows and others else None

    def parser(self, asked: Mapping[str, Any], prompt_end: str, *, all_tokens: bool) -> AnswerParser | None:
        """The parser of one answer; None where all of it is words.

        Args:
            asked: see `ChatRequest.reading`.
            prompt_end: the last characters of the prompt.
            all_tokens: the client wants to see special tokens.

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
            unseen=None if all_tokens else self._unseen,
        )

    def sampling(
        self, asked: Mapping[str, Any], prompt_end: str, sampling: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The sampling of an answer that a parser reads: what it looks for is shown, and a structure leaves
        room for the reasoning before it and for calls in its place.

        Raises:
            ApiError: 400, the structure leaves no room for calls.
        """
        said = dict(sampling)
        if self._shows:
            said["skip_special_tokens"] = False
        kinds = [kind for kind in STRUCTURES if said.get(kind)]
        if not kinds:
            return said
        thinking, end = self._reads_reasoning(prompt_end), self._token(END)
        if thinking is not None and end is not None:
            said["reasoning"] = (None if thinking.thinks else self._token(BEGIN), end)
        if asked.get("mode") == "auto" and self.tools is not None:
            self._leave_room(asked, kinds, said)
        return said

    def _leave_room(self, asked: Mapping[str, Any], kinds: Sequence[str], said: dict[str, Any]) -> None:
        """An answer may be calls in place of its structure."""
        parser = TOOL_PARSERS[self.tools or ""]
        first = parser.MARKS[0]
        mark = self._token(first)
        if mark is not None and (parser.BEGINS or "").startswith(re.escape(first)):
            said["instead_token_ids"] = (mark,)
            return
        if kinds != ["json_schema"]:
            raise bad_request(
                "An answer that keeps to a structure leaves no room for this model's calls of tools;"
                " set 'tool_choice' to 'none'.",
                param="tools",
            )
        if parser.BEGINS is None:
            either = schema_or_calls(json.loads(said["json_schema"]), asked["functions"])
            said["json_schema"] = json.dumps(either)
            return
        names = "|".join(re.escape(one["name"]) for one in asked["functions"])
        begins = parser.BEGINS.replace("FUNCTIONS", f"({names})").replace("/", r"\/")
        said["grammar"] = (
            f"start: answer | call\nanswer: %json {said.pop('json_schema')}\ncall: /{begins}(.|\\n)*/\n"
        )

    def _reads_reasoning(self, prompt_end: str) -> Thinking | None:
        if self.reasoning is None:
            return None
        end = prompt_end.rstrip()
        if self.reasoning == "qwen3":
            return Thinking(open=end.endswith(BEGIN))
        return Thinking(open=not end.endswith(END))

    def _reads_calls(self, asked: Mapping[str, Any]) -> Parser | None:
        if "functions" not in asked:
            return None
        if asked["mode"] == "named":
            return NamedCall(asked["name"])
        if asked["mode"] == "required":
            return CallList()
        if self.tools is None:
            raise bad_request(
                "This model's calls of tools cannot be read: its chat template shows no format that is known."
                " Set `tools` of the app, or ask with tool_choice 'required'.",
                param="tools",
                code="tools_not_supported",
            )
        functions = [Function(one["name"], one.get("parameters") or {}) for one in asked["functions"]]
        return TOOL_PARSERS[self.tools](functions)

    def _new_id(self) -> str:
        if self.tools == "mistral":
            return "".join(secrets.choice(_CHARACTERS) for _ in range(_SHORT_ID))
        return f"call_{secrets.token_hex(12)}"
