"""Calls of Llama 3.1 and 3.2: the answer is a JSON object, or several with semicolons between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from serve_apps.parsing.json_calls import CallObject
from serve_apps.parsing.mark_finder import MarkFinder
from serve_apps.parsing.parts import CallBegins, Function, Part, Text

BEGIN = "<|python_tag|>"


class Llama3Json:
    """See Parser. An object counts as a call where it names one of the functions: it may be an answer, too.

    Args:
        functions: those that the model may call.
    """

    MARKS: ClassVar[tuple[str, ...]] = (BEGIN,)
    BEGINS: ClassVar[str | None] = None

    def __init__(self, functions: Sequence[Function]) -> None:
        self._known = frozenset(function.name for function in functions)
        self._text = MarkFinder(BEGIN)
        self._expecting = True
        """A call may begin here."""
        self._before = ""
        """What stands before it, shown where none begins."""
        self._pending = ""
        """What may become the mark."""
        self._call: CallObject | None = None
        self._called = False

    def feed(self, text: str) -> Sequence[Part]:
        """See Parser."""
        parts: list[Part] = []
        while text:
            if self._call is not None:
                more, text = self._call.feed(text)
                parts += self._told(self._call, more)
            elif self._expecting:
                text = self._expect(text, parts)
            else:
                before, mark, text = self._text.feed(text)
                parts += [Text(before)] if before else []
                if mark is not None:
                    self._expecting, self._before = True, mark
        return parts

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        if self._call is not None:
            return self._told(self._call, self._call.finish())
        rest = self._before + self._pending + self._text.flush()
        return [Text(rest)] if rest.strip() else []

    def _expect(self, text: str, parts: list[Part]) -> str:
        text, self._pending = self._pending + text, ""
        left = text.lstrip(" \t\r\n;," if self._called else " \t\r\n")
        blanks = text[: len(text) - len(left)]
        if left.startswith("{"):
            self._before += blanks
            self._call = CallObject(self._known)
        elif left.startswith(BEGIN):
            self._before += blanks + BEGIN
            left = left[len(BEGIN) :]
        elif BEGIN.startswith(left):
            self._pending, left = text, ""
        else:
            self._expecting = False
            before, self._before = self._before + blanks, ""
            if before and not self._called:
                parts.append(Text(before))
        return left

    def _told(self, call: CallObject, parts: Sequence[Part]) -> list[Part]:
        if any(isinstance(part, CallBegins) for part in parts):
            self._called, self._before = True, ""
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                told.append(Text(self._before + part.text))
                self._before, self._expecting = "", False
            else:
                told.append(part)
        if call.over:
            self._call = None
        return told
