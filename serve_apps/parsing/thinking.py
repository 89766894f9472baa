"""Reasoning between `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from collections.abc import Sequence

from serve_apps.parsing.mark_finder import MarkFinder
from serve_apps.parsing.parts import Part, Reasoning, Text

BEGIN, END = "<think>", "</think>"


class Thinking:
    """See Parser. Blanks at both ends of the reasoning, and before the answer, are not part of either.

    Args:
        open: the prompt ends with the opening mark, or the model leaves it out.
    """

    MARKS = (BEGIN, END)

    def __init__(self, *, open: bool) -> None:
        self._open = open
        self._state = "start"
        self._start = ""
        """What may become the opening mark."""
        self._end = MarkFinder(END)
        self._blanks = ""
        """Held back until more of the reasoning follows."""
        self._any = False

    @property
    def thinks(self) -> bool:
        """What comes now is reasoning."""
        return self._state == "reasoning" or (self._state == "start" and self._open)

    @property
    def over(self) -> bool:
        """The answer has begun."""
        return self._state == "answer"

    def feed(self, text: str) -> Sequence[Part]:
        """See Parser."""
        parts: list[Part] = []
        while text:
            if self._state == "start":
                text = self._begin(text)
            elif self._state == "reasoning":
                before, mark, text = self._end.feed(text)
                parts += self._reason(before)
                if mark is not None:
                    self._state, self._blanks = "before the answer", ""
            elif self._state == "before the answer":
                text = text.lstrip()
                self._state = "answer" if text else self._state
            else:
                parts.append(Text(text))
                break
        return parts

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        if self._state == "reasoning":
            return self._reason(self._end.flush())
        if self._state == "start" and self._start:
            return [Reasoning(self._start) if self._open else Text(self._start)]
        return []

    def _begin(self, text: str) -> str:
        text, self._start = self._start + text, ""
        left = text.lstrip()
        if left.startswith(BEGIN):
            self._state = "reasoning"
            return left[len(BEGIN) :]
        if BEGIN.startswith(left):
            self._start = text
            return ""
        self._state = "reasoning" if self._open else "answer"
        return text

    def _reason(self, text: str) -> list[Part]:
        text = self._blanks + text
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if not self._any:
            said = said.lstrip()
            self._any = bool(said)
            self._blanks = self._blanks if self._any else ""
        return [Reasoning(said)] if said else []
