"""Calls of Mistral's models: `[TOOL_CALLS]` before a JSON list, or before each `name[ARGS]{...}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from serve_apps.parsing.json_calls import CallList
from serve_apps.parsing.json_text import ValueReader
from serve_apps.parsing.mark_finder import MarkFinder
from serve_apps.parsing.parts import Arguments, CallBegins, CallEnds, Function, Part, Text

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral:
    """See Parser; the formats are those of mistral-common's tokenizers before version 11, and from it on."""

    MARKS: ClassVar[tuple[str, ...]] = (BEGIN, ARGUMENTS, ID)
    BEGINS: ClassVar[str | None] = r"\[TOOL_CALLS\]"

    def __init__(self, functions: Sequence[Function]) -> None:
        self._text = MarkFinder(BEGIN)
        self._list: CallList | None = None
        self._head: str | None = None
        """What came between the mark and the arguments, which begin with a brace."""
        self._arguments: ValueReader | None = None

    def feed(self, text: str) -> Sequence[Part]:
        """See Parser."""
        parts: list[Part] = []
        while text:
            if self._list is not None:
                parts += self._list.feed(text)
                break
            if self._arguments is not None:
                text = self._read(self._arguments, text, parts)
            elif self._head is not None:
                text = self._read_head(text, parts)
            else:
                before, mark, text = self._text.feed(text)
                parts += [Text(before)] if before else []
                self._head = "" if mark is not None else None
        return parts

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        if self._list is not None:
            return self._list.finish()
        if self._arguments is not None:
            return []
        rest = self._text.flush() if self._head is None else BEGIN + self._head
        return [Text(rest)] if rest.strip() else []

    def _read_head(self, text: str, parts: list[Part]) -> str:
        assert self._head is not None
        left = text.lstrip() if not self._head.strip() else text
        if left.startswith("[") and not self._head.strip():
            self._list = CallList()
            return left
        before, brace, after = text.partition("{")
        self._head += before
        if not brace:
            return ""
        name = self._head.partition(ARGUMENTS)[0].partition(ID)[0].strip()
        if not name:
            # One call without its list.
            self._list = CallList()
            return brace + after
        parts.append(CallBegins(name))
        self._head, self._arguments = None, ValueReader()
        return brace + after

    def _read(self, arguments: ValueReader, text: str, parts: list[Part]) -> str:
        read, text = arguments.feed(text)
        parts += [Arguments(read)] if read else []
        if arguments.done or arguments.broken:
            parts += [CallEnds()] if arguments.done else []
            self._arguments = None
        return text
