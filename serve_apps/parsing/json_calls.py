"""Calls that are written as JSON objects: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from serve_apps.parsing.json_text import MemberPiece, ObjectReader
from serve_apps.parsing.parts import Arguments, CallBegins, CallEnds, Part, Text

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
"""Members that some models add; they say nothing."""


class CallObject:
    """Reads one call from its opening brace on; nothing is told of it before its name is known.

    Args:
        known: the only names that make an object a call; None takes any.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self.over = False
        """The object has ended, or is no call."""
        self._known = known
        self._object = ObjectReader()
        self._raw = ""
        """All that came, while the name is not known."""
        self._name = ""
        self._begun = False
        self._early = ""
        """Arguments that came before the name."""
        self._told = False
        self._in_string: list[str] | None = None
        """The pieces of arguments that are a string with JSON in it."""

    def feed(self, text: str) -> tuple[list[Part], str]:
        """The parts that are certain now, and what follows the object once it is `over`."""
        pieces, rest = self._object.feed(text)
        parts: list[Part] = []
        if not self._begun:
            self._raw += text[: len(text) - len(rest)]
        for piece in pieces:
            if not self.over:
                parts += self._take(piece)
        if self.over:
            # It is no call; what was read of this piece behind the mistake is the reader's too.
            parts.append(Text(self._raw))
        elif self._object.done or self._object.broken:
            parts += self.finish()
            if self._object.done and self._begun:
                parts.append(CallEnds())
        return parts, rest

    def finish(self) -> list[Part]:
        """The rest, where nothing follows any more."""
        if self.over:
            return []
        self.over = True
        if not self._begun:
            return [Text(self._raw)] if self._raw else []
        if self._in_string is not None:
            return [Arguments(_unquoted("".join(self._in_string)))]
        return [] if self._told or not self._object.done else [Arguments("{}")]

    def _take(self, piece: MemberPiece) -> list[Part]:
        if piece.key == "name":
            return self._take_name(piece)
        if piece.key in _ARGUMENTS:
            if self._begun:
                return self._take_arguments(piece.text)
            self._early += piece.text
        elif piece.key == "function" and not self._begun:
            # OpenAI's own nesting has no place in a text; a flat object with the name under this key has.
            return self._take_name(piece)
        elif piece.key not in _OTHERS and not self._begun and self._known is not None:
            self.over = True
        return []

    def _take_name(self, piece: MemberPiece) -> list[Part]:
        self._name += piece.text
        if self._begun or not piece.complete:
            return []
        name = _unquoted(self._name)
        if not name or (self._known is not None and name not in self._known):
            self.over = True
            return []
        self._begun = True
        self._raw = ""
        early, self._early = self._early, ""
        return [CallBegins(name), *(self._take_arguments(early) if early else [])]

    def _take_arguments(self, text: str) -> list[Part]:
        if not text:
            return []
        if not self._told and self._in_string is None:
            if text[0] == '"':
                self._in_string = []
            elif text[0] != "{":
                return []  # null: no arguments
        if self._in_string is not None:
            self._in_string.append(text)
            return []
        self._told = True
        return [Arguments(text)]


class CallList:
    """Reads calls in a JSON list, or one after the other; `start` is whether the bracket is still to come.

    Args:
        known: as for CallObject.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known = known
        self._call: CallObject | None = None
        self._over = False

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain now; what follows the list is no call."""
        parts: list[Part] = []
        while text:
            if self._call is not None:
                more, text = self._call.feed(text)
                parts += more
                self._call = None if self._call.over else self._call
            elif self._over:
                parts.append(Text(text))
                break
            elif text[0] == "{":
                self._call = CallObject(self._known)
            elif text[0] == "]":
                self._over, text = True, text[1:]
            elif text[0] in "[, \t\r\n;":
                text = text[1:]
            else:
                self._over = True
        return parts

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        return self._call.finish() if self._call is not None else []


class NamedCall:
    """The whole answer is the arguments of one function, since the request says so.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> Sequence[Part]:
        """See Parser."""
        begins = [] if self._begun else [CallBegins(self._name)]
        self._begun = True
        return [*begins, Arguments(text)] if text else begins

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        return [CallEnds()] if self._begun else []


def _unquoted(text: str) -> str:
    """The string that a piece of JSON is, or the text itself where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
