"""Calls of Llama 4 and other models as a list of Python calls: `[weather(city="Paris"), time()]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import ClassVar

from serve_apps.parsing.mark_finder import MarkFinder
from serve_apps.parsing.parts import Arguments, CallBegins, CallEnds, Function, Part, Text

BEGIN, END = "<|python_start|>", "<|python_end|>"
_HEAD = re.compile(r"\s*(?:" + re.escape(BEGIN) + r")?\s*\[\s*([A-Za-z_][\w.-]*)\s*\(")
_NEXT = re.compile(r"\s*,?\s*([A-Za-z_][\w.-]*)\s*\(")
_MAY_BECOME_HEAD = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.-]*\s*)?)?")
_MAY_BECOME_NEXT = re.compile(r"\s*,?\s*(?:[A-Za-z_][\w.-]*\s*)?")


class Pythonic:
    """See Parser. A list counts as calls where it begins with one of the functions: it may be an answer, too.

    Args:
        functions: those that the model may call.
    """

    MARKS: ClassVar[tuple[str, ...]] = (BEGIN, END)
    BEGINS: ClassVar[str | None] = r"\[\s*FUNCTIONS\("

    def __init__(self, functions: Sequence[Function]) -> None:
        self._known = frozenset(function.name for function in functions)
        self._read = self._start
        self._raw = ""
        """What came of the call that is being read, or of what may become the first."""
        self._name = ""
        self._end = _CallEnd()
        self._tail = MarkFinder(END)

    def feed(self, text: str) -> Sequence[Part]:
        """See Parser."""
        parts: list[Part] = []
        while text:
            text = self._read(text, parts)
        return parts

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        rest = self._tail.flush() + self._raw
        return [Text(rest)] if rest.strip() else []

    def _start(self, text: str, parts: list[Part]) -> str:
        text, self._raw = self._raw + text, ""
        found = _HEAD.match(text)
        if found is not None and found[1] in self._known:
            return self._begin(found[1], text, found.end())
        left = text.lstrip()
        may = found is None and (
            BEGIN.startswith(left) or _MAY_BECOME_HEAD.fullmatch(left.removeprefix(BEGIN)) is not None
        )
        if may:
            self._raw = text
            return ""
        self._read = self._words
        return text

    def _begin(self, name: str, text: str, opened: int) -> str:
        self._name, self._raw, self._end = name, text[:opened], _CallEnd()
        self._read = self._call
        return text[opened:]

    def _call(self, text: str, parts: list[Part]) -> str:
        at = self._end.find(text)
        if at is None:
            self._raw += text
            return ""
        call, self._raw = self._raw + text[:at], ""
        try:
            arguments = _arguments(call)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            parts.append(Text(call))
            self._read = self._words
            return text[at:]
        parts += [CallBegins(self._name), Arguments(json.dumps(arguments, ensure_ascii=False)), CallEnds()]
        self._read = self._between
        return text[at:]

    def _between(self, text: str, parts: list[Part]) -> str:
        text, self._raw = self._raw + text, ""
        left = text.lstrip()
        if left.startswith("]"):
            self._read = self._words
            return left[1:]
        if (found := _NEXT.match(text)) is not None:
            return self._begin(found[1], text, found.end())
        if _MAY_BECOME_NEXT.fullmatch(text) is not None:
            self._raw = text
            return ""
        self._read = self._words
        return text

    def _words(self, text: str, parts: list[Part]) -> str:
        before, _, text = self._tail.feed(text)
        parts += [Text(before)] if before else []
        return text


class _CallEnd:
    """Finds the parenthesis that closes a call, whose opening one has been read."""

    def __init__(self) -> None:
        self._depth = 1
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Behind it; None where it is still to come."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None


def _arguments(call: str) -> dict[str, object]:
    """The named arguments of a call; raises ValueError or SyntaxError where they are no literals."""
    source = call[call.index("(") :]
    tree = ast.parse(f"call{source}", mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args or any(one.arg is None for one in tree.keywords):
        raise ValueError("not a call with named arguments")
    return {str(one.arg): _literal(one.value) for one in tree.keywords}


def _literal(node: ast.expr) -> object:
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_literal(key)): _literal(value) for key, value in pairs if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value of JSON's")
    return value
