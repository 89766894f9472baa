"""JSON that comes in pieces: where a value ends, and the members of an object as the text that they came in.

Only what is needed to find the ends is looked at; whether the text between them is JSON is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BLANK = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r"[\s\w+\-.:,]*")
"""Characters between the strings and brackets of a value; anything else is no JSON."""


class ValueReader:
    """Reads one value: an object, an array or a string up to its end, or a word or number."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        """What came is no JSON."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._in_word = False

    def feed(self, text: str) -> tuple[str, str]:
        """What of `text` belongs to the value, and what follows it once it is `done` or `broken`."""
        at, size = 0, len(text)
        while at < size and not (self.done or self.broken):
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                at = self._string(text, at)
            elif self._depth:
                at = self._nested(text, at)
            else:
                at = self._top(text, at)
        return text[:at], text[at:]

    def _string(self, text: str, at: int) -> int:
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _nested(self, text: str, at: int) -> int:
        between = _OUTSIDE.match(text, at)
        assert between is not None
        at = between.end()
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        else:
            self.broken = True
            return at
        return at + 1

    def _top(self, text: str, at: int) -> int:
        char = text[at]
        if self._in_word:
            if char.isalnum() or char in "+-._":
                return at + 1
            self.done = True
            return at
        if char in _BLANK:
            return at + 1
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth = 1
        elif char.isalnum() or char in "+-.":
            self._in_word = True
        else:
            self.broken = True
            return at
        return at + 1


@dataclass(frozen=True, slots=True)
class MemberPiece:
    """A piece of the text of one member's value; the last one is `complete`."""

    key: str
    text: str
    complete: bool


class ObjectReader:
    """Reads one object, from its opening brace to its closing one."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        """What came is no JSON object."""
        self._opened = False
        self._key: ValueReader | None = None
        self._key_text = ""
        self._value: ValueReader | None = None
        self._colon = False

    def feed(self, text: str) -> tuple[Sequence[MemberPiece], str]:
        """What the members of the object gained, and what follows it once it is `done` or `broken`."""
        pieces: list[MemberPiece] = []
        while text and not (self.done or self.broken):
            if self._value is not None:
                text = self._read_value(self._value, text, pieces)
            elif self._key is not None and not self._key.done:
                read, text = self._key.feed(text)
                self._key_text += read
                self.broken = self._key.broken
            elif text[0] in _BLANK:
                text = text[1:]
            elif not self._opened:
                self._opened = text[0] == "{"
                self.broken = not self._opened
                text = text[1:] if self._opened else text
            elif self._colon:
                self._value, self._colon = ValueReader(), False
            elif self._key is not None:
                self._colon = text[0] == ":"
                self.broken = not self._colon
                text = text[1:] if self._colon else text
            elif text[0] == "}":
                self.done, text = True, text[1:]
            elif text[0] == ",":
                text = text[1:]
            elif text[0] == '"':
                self._key, self._key_text = ValueReader(), ""
            else:
                self.broken = True
        return pieces, text

    def _read_value(self, value: ValueReader, text: str, pieces: list[MemberPiece]) -> str:
        read, text = value.feed(text)
        pieces.append(MemberPiece(self._key_text[1:-1], read, value.done))
        self.broken = value.broken
        if value.done:
            self._key = self._value = None
        return text
