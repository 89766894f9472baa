"""From an answer's text, as it comes, to what the reader is told: words, reasoning, calls of tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serve_apps.parsing.parts import Arguments, CallBegins, CallEnds, Parser, Part, Reasoning, Text
from serve_apps.parsing.thinking import Thinking

CallPiece = tuple[int, str | None, str | None, str]
"""(number of the call in the answer, its id and its name where it begins here, a piece of its arguments)"""


@dataclass
class Told:
    """What a piece of an answer's text tells."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    thought: bool = False
    """The text was reasoning, told or not."""
    answers: bool = True
    """The answer itself had begun by the end of the text."""
    text_after_calls: int = 0
    """Characters at the end of the text that came after the answer's first call had begun."""


class Reader(Protocol):
    """Reads one answer, whose text comes in pieces."""

    num_calls: int
    """Calls that have begun."""
    complete: bool
    """Nothing that follows would be told."""

    def read(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Told:
        """What is certain now; all that was held back once the answer has finished."""


class AnswerParser:
    """Reads one answer.

    Args:
        reasoning: reads the model's reasoning; what it takes for words goes on to `calls`.
        calls: reads its calls.
        new_id: makes the id of a call.
        parallel: an answer may have several calls; else it is `complete` with its first.
        hide_reasoning: the reasoning is read, and not told.
        unseen: finds special tokens that are in the text only so that others can be read; they are left out.
    """

    def __init__(
        self,
        reasoning: Thinking | None,
        calls: Parser | None,
        new_id: Callable[[], str],
        *,
        parallel: bool = True,
        hide_reasoning: bool = False,
        unseen: re.Pattern[str] | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._new_id = new_id
        self._parallel = parallel
        self._hide_reasoning = hide_reasoning
        self._unseen = unseen
        self._blanks = ""
        """Held back: those before a call are not part of the words."""
        self.num_calls = 0
        self.complete = False
        """Nothing that follows would be told."""

    def read(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Told:
        """What is certain now; all that was held back once the answer has finished.

        Args:
            token_ids: the text's, which other readers go by.
        """
        told = self.feed(text)
        if finished:
            self.finish(told)
        told.answers = self.answers
        return told

    def feed(self, text: str) -> Told:
        """What is certain now."""
        told = Told(thought=self.thinks)
        if self._unseen is not None:
            text = self._unseen.sub("", text)
        if text and not self.complete:
            self._tell(self._read(self._reasoning.feed(text) if self._reasoning else [Text(text)]), told)
        return told

    @property
    def thinks(self) -> bool:
        """The answer has not begun: what comes now is reasoning."""
        return self._reasoning is not None and self._reasoning.thinks

    @property
    def answers(self) -> bool:
        """The answer has begun: nothing that comes now is reasoning, or may become it."""
        return self._reasoning is None or self._reasoning.over

    def finish(self, told: Told) -> None:
        """Add what was held back, once no more text will come."""
        if not self.complete:
            if self._reasoning is not None:
                self._tell(self._read(self._reasoning.finish()), told)
            if self._calls is not None:
                self._tell(self._calls.finish(), told)
        if not self.num_calls:
            told.text += self._blanks
        self._blanks = ""

    def _read(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts, with what is words to the first parser read by the second."""
        if self._calls is None:
            return parts
        read: list[Part] = []
        for part in parts:
            read += self._calls.feed(part.text) if isinstance(part, Text) else [part]
        return read

    def _tell(self, parts: Sequence[Part], told: Told) -> None:
        for part in parts:
            if self.complete:
                return
            if isinstance(part, Text):
                words = self._blanks + part.text
                said = words.rstrip() if self._calls is not None else words
                self._blanks = words[len(said) :]
                told.text += said
                told.text_after_calls += len(said) if self.num_calls else 0
            elif isinstance(part, Reasoning):
                told.reasoning += "" if self._hide_reasoning else part.text
            elif isinstance(part, CallBegins):
                self._blanks = ""
                told.calls.append((self.num_calls, self._new_id(), part.name, ""))
                self.num_calls += 1
            elif isinstance(part, Arguments):
                told.calls.append((self.num_calls - 1, None, None, part.text))
            elif isinstance(part, CallEnds):
                self.complete = not self._parallel
