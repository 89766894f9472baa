"""Text out of token ids, as it comes: no half characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from serve_apps.parsing.mark_finder import overlap

REPLACEMENT = "�"
"""What a decoder writes for bytes that are no character (yet)."""

_CONTEXT = 8
"""Tokens of the prompt that open the first window."""

_PATIENCE = 8
"""Tokens without a whole character at their end after which what is there is given out. A character has at
most four bytes and a token at least one, so text that is text never waits that long."""

_UNFINISHED = 4
"""Tokens that surely hold the bytes of an unfinished character."""


class Detokenizer:
    """Turns the tokens of one answer into text, a token at a time.

    Decoding one token alone is wrong (a character may span tokens, and some tokenizers drop the blank before
    the first word), so each token is decoded behind those of the last piece of text, and what that adds is
    the new text; the method of Hugging Face's text-generation-inference.

    Args:
        decode: from token ids to text.
        prompt_ids: the tokens before the answer.
        piece: the bytes of a token id.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int],
        piece: Callable[[int], bytes],
    ) -> None:
        self._decode = decode
        self._piece = piece
        self._context = list(prompt_ids[-_CONTEXT:])
        self._pending: list[int] = []
        self._before = decode(self._context) if self._context else ""
        """The text of the prompt's end, until the answer's first text is out."""
        self._begun = self._unfinished(self._context)
        """Bytes of a character that the prompt begins, and the answer may complete."""
        self._shown = len(self._before)

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before; what may be half a character is held back."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        self._look_at_begun(text)
        unfinished = text.endswith(REPLACEMENT)
        overdue = len(self._pending) >= _PATIENCE
        if unfinished and not overdue:
            return ""
        new = (text[:-1] if unfinished else text)[self._shown :]
        if new:
            self._before, self._begun = "", b""
            self._context = self._pending[-_UNFINISHED:] if unfinished else self._pending
            text = self._decode(self._context)
            self._shown = len(text) - unfinished
            self._pending = []
        elif overdue and not unfinished:
            self._pending = []  # tokens without text; forget them, or a run of them costs its square
        return new

    def finish(self) -> str:
        """The whole characters that were held back, once no more tokens will come; half a one is dropped."""
        pending, self._pending = self._pending, []
        text = self._decode(self._context + pending)
        new = text[self._shown :]
        return new[: self._whole(new, [*self._context, *pending])]

    def _look_at_begun(self, text: str) -> None:
        """Where the answer completes a character that the prompt begins, that is of the answer."""
        if not self._before.endswith(REPLACEMENT):
            return
        gained = b"".join(self._piece(token) for token in self._pending)
        if self._begun and _completes(self._begun, gained):
            self._shown = self._whole(self._before, self._context)
        elif not text.startswith(self._before):
            # So it does too where a tokenizer's bytes are not known.
            self._shown = len(self._before.rstrip(REPLACEMENT))

    def _whole(self, text: str, token_ids: Sequence[int]) -> int:
        """Characters of a text that ends with these tokens' without those for half a character at its end.

        The replacement character is a character too: somebody may have written one, with all its bytes.
        """
        end = len(text.rstrip(REPLACEMENT))
        if end == len(text):
            return end
        tail = b"".join(self._piece(token) for token in token_ids)
        whole = codecs.getincrementaldecoder("utf-8")("replace").decode(tail)
        return min(len(text), end + len(whole) - len(whole.rstrip(REPLACEMENT)))

    def _unfinished(self, token_ids: Sequence[int]) -> bytes:
        """The bytes at the end of these tokens' that only begin a character."""
        if not self._before.endswith(REPLACEMENT):
            return b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(self._piece(token) for token in token_ids))
        return decoder.getstate()[0]


def _completes(begun: bytes, gained: bytes) -> bool:
    """Whether the bytes that follow make a character of those that began it."""
    try:
        return bool(codecs.getincrementaldecoder("utf-8")().decode(begun + gained[: 4 - len(begun)]))
    except UnicodeDecodeError as error:
        return error.start > 0


class StopMatcher:
    """Passes text through until a stop string appears; what could be the start of one is held back.

    Where several match, the one that is complete first ends the text, so that the result does not depend on
    how the text was cut into pieces.

    Args:
        keep: what matches is part of the text.
    """

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        self._keep = keep
        self._stop = tuple(string for string in stop if string)
        self._held = ""
        self.matched: str | None = None
        """The stop string that has ended the text."""

    def add(self, text: str) -> str:
        """The part of the text so far that is certain to belong to the answer and was not returned yet."""
        if not self._stop or self.matched is not None:
            return "" if self.matched is not None else text
        text = self._held + text
        # The earliest end; where two end together, the longer one.
        ends = [(at + len(string), at) for string in self._stop if (at := text.find(string)) >= 0]
        if ends:
            end, begin = min(ends)
            self.matched = text[begin:end]
            self._held = ""
            return text[: end if self._keep else begin]
        keep = max(overlap(text, string) for string in self._stop)
        certain = len(text) - keep
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held
