"""Finds marks like `<tool_call>` in text that comes in pieces."""

from __future__ import annotations


class MarkFinder:
    """Waits for the first of several marks.

    Args:
        marks: strings, none of them empty.
    """

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """What is certain to stand before any mark; the mark, if one is complete; and what follows it.

        What may be the start of a mark is held back until more comes.
        """
        text = self._held + text
        found = [(at, -len(mark), mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            # A longer mark that begins earlier may still become complete.
            if not any(self._begins_before(text, at, other) for other in self._marks):
                self._held = ""
                return text[:at], mark, text[at + len(mark) :]
        certain = len(text) - max(overlap(text, mark) for mark in self._marks)
        certain = min([certain, *(at for at, _, _ in found)])
        self._held = text[certain:]
        return text[:certain], None, ""

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begins_before(text: str, at: int, mark: str) -> bool:
        length = overlap(text, mark)
        return length > 0 and len(text) - length < at


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that starts `mark` and is not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
