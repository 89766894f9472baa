"""A conversation as chat templates take it, put together from what other APIs send in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pydantic_core

Turn = dict[str, Any]
OPERATOR = ("system", "developer")
"""Roles of who runs the model, not of who speaks with it."""


@dataclass
class _Growing:
    """A turn to which pieces are added; joined at the end, so that many cost no more than their size."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None

    def turn(self) -> Turn:
        turn: Turn = {"role": self.role, "content": paragraphs(self.texts)}
        if self.thoughts:
            turn["reasoning_content"] = paragraphs(self.thoughts)
        if self.calls:
            turn["tool_calls"] = self.calls
        if self.call_id is not None:
            turn["tool_call_id"] = self.call_id
        return turn


class Turns:
    """Collects turns: pieces of one answer that stand side by side become one turn of the assistant."""

    def __init__(self) -> None:
        self._turns: list[_Growing] = []

    @property
    def begun(self) -> bool:
        """Somebody else than the operator has said something."""
        return any(turn.role not in OPERATOR for turn in self._turns[:2])

    def done(self) -> list[Turn]:
        """All turns.

        Raises:
            ValueError: there are none.
        """
        if not self._turns:
            raise ValueError("must hold something that can be answered")
        return [turn.turn() for turn in self._turns]

    def system(self, text: str, role: str = "system") -> None:
        """Add what the operator says; all that stands before anybody else is one turn."""
        if len(self._turns) != 1 or self._turns[0].role not in OPERATOR:
            self.say(role, text)
            return
        (first,) = self._turns
        first.role = role if first.role == role else "system"
        first.texts.append(text)

    def say(self, role: str, text: str) -> None:
        """Add a turn of somebody else than the assistant."""
        self._turns.append(_Growing(role, [text]))

    def say_more(self, role: str, text: str) -> None:
        """The same, as part of the turn before where that is of the same."""
        if self._turns and self._turns[-1].role == role:
            self._turns[-1].texts.append(text)
        else:
            self.say(role, text)

    def result(self, call_id: str, text: str) -> None:
        """Add what a call has brought."""
        self._turns.append(_Growing("tool", [text], call_id=call_id))

    def answer(self, text: str) -> None:
        """Add words of the assistant; words after a call belong to the turn of the call."""
        turn = self._assistant()
        if turn.texts and not turn.calls:
            self.say("assistant", text)
        else:
            turn.texts.append(text)

    def think(self, text: str) -> None:
        """Add reasoning of the assistant, which comes before words and calls."""
        turn = self._assistant()
        if turn.texts or turn.calls:
            turn = _Growing("assistant")
            self._turns.append(turn)
        turn.thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a call that the assistant has made."""
        function = {"name": name, "arguments": arguments}
        self._assistant().calls.append({"id": call_id, "type": "function", "function": function})

    def _assistant(self) -> _Growing:
        if not self._turns or self._turns[-1].role != "assistant":
            self._turns.append(_Growing("assistant"))
        return self._turns[-1]


def opened(text: str | None, turns: list[Turn]) -> list[Turn]:
    """The turns, with what stands apart from them at the beginning: one turn with the operator's first."""
    if not text:
        return turns
    first = Turns()
    first.system(text)
    if turns[0]["role"] in OPERATOR:
        first.system(turns[0]["content"], turns[0]["role"])
        turns = turns[1:]
    return [*first.done(), *turns]


def paragraphs(texts: Iterable[str]) -> str:
    """Texts as one."""
    return "\n\n".join(text for text in texts if text)


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call as an object, which templates and clients want; of what is no whole JSON what
    can be read: a model that was cut off must not end the conversation."""
    try:
        found = pydantic_core.from_json(text, allow_inf_nan=False, allow_partial=True)
        json.dumps(found, allow_nan=False)  # it may be a number beyond all bounds, or nested too deeply
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
