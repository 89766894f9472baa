"""Tokens without text, as every model has them: pieces of a character, what may begin a stop string."""

from __future__ import annotations


class HeldText:
    """Gives the text of tokens as a detokenizer does: that of every second one comes with the next."""

    def __init__(self) -> None:
        self._held = ""
        self._holds = False

    def add(self, text: str, *, last: bool) -> str:
        """The text that is certain with this token; all of it with the last."""
        self._holds, holds = not self._holds, self._holds and not last
        text = self._held + text
        self._held = text if holds else ""
        return "" if holds else text
