"""Calls of Hermes, Qwen 2.5 and Qwen 3: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from serve_apps.parsing.json_calls import CallObject
from serve_apps.parsing.mark_finder import MarkFinder
from serve_apps.parsing.parts import CallBegins, Function, Part, Text

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """See Parser; the format is that of Hermes Function Calling (NousResearch, 2024)."""

    MARKS: ClassVar[tuple[str, ...]] = (BEGIN, END)
    BEGINS: ClassVar[str | None] = BEGIN

    def __init__(self, functions: Sequence[Function]) -> None:
        self._text = MarkFinder(BEGIN)
        self._inside: str | None = None
        """Blanks between the mark and the call, while the call has not begun."""
        self._call: CallObject | None = None
        self._opening = ""
        """What stood before it."""
        self._named = False
        self._after: MarkFinder | None = None
        """Waits for the mark behind a call."""
        self._words_follow = False

    def feed(self, text: str) -> Sequence[Part]:
        """See Parser."""
        parts: list[Part] = []
        while text:
            if self._after is not None:
                text = self._close(self._after, text, parts)
            elif self._call is not None:
                more, text = self._call.feed(text)
                parts += self._told(more)
                if self._call.over:
                    self._call = None
                    self._after = MarkFinder(END, BEGIN) if self._named else None
            elif self._inside is not None:
                text = self._open(text, parts)
            else:
                before, mark, text = self._text.feed(text)
                parts += [Text(before)] if before else []
                self._inside = "" if mark is not None else None
        return parts

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        if self._after is not None:
            rest = self._after.flush()
        elif self._call is not None:
            return self._told(self._call.finish())
        elif self._inside is not None:
            rest = BEGIN + self._inside
        else:
            rest = self._text.flush()
        return [Text(rest)] if rest.strip() else []

    def _open(self, text: str, parts: list[Part]) -> str:
        assert self._inside is not None
        left = text.lstrip()
        blanks = text[: len(text) - len(left)]
        if not left:
            self._inside += blanks
            return ""
        if left[0] == "{":
            self._call, self._named = CallObject(), False
            self._opening = BEGIN + self._inside + blanks
        else:
            parts.append(Text(BEGIN + self._inside + blanks))
        self._inside = None
        return left

    def _told(self, parts: Sequence[Part]) -> list[Part]:
        """What was no call is shown with the mark that stood before it."""
        self._named = self._named or any(isinstance(part, CallBegins) for part in parts)
        if self._named:
            return list(parts)
        return [Text(self._opening + part.text) if isinstance(part, Text) else part for part in parts]

    def _close(self, after: MarkFinder, text: str, parts: list[Part]) -> str:
        before, mark, text = after.feed(text)
        # Weak models write a brace too many before the mark.
        before = before if self._words_follow else before.lstrip(" \t\r\n}")
        self._words_follow = self._words_follow or bool(before)
        parts += [Text(before)] if before else []
        if mark is not None:
            self._after, self._words_follow = None, False
            self._inside = "" if mark == BEGIN else None
        return text
