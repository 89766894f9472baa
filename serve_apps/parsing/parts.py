"""What an answer is made of, in the order in which it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The model calls a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON of the arguments of the call that began last, as the model wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The call that began last is complete."""


Part = Text | Reasoning | CallBegins | Arguments | CallEnds


@dataclass(frozen=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of its arguments."""


class Parser(Protocol):
    """Reads one answer, whose text comes in pieces of any size.

    The parts are the same however the text was cut, but for where Text, Reasoning and Arguments are cut.
    Text that begins like a call and is none comes out as Text: nothing of an answer is lost.
    """

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain now."""

    def finish(self) -> Sequence[Part]:
        """What was held back, once no more text will come."""


class ToolParser(Parser, Protocol):
    """Reads the calls of one family of models.

    Args:
        functions: those that the model may call.
    """

    MARKS: ClassVar[tuple[str, ...]]
    """Strings that it looks for, which a tokenizer may have as special tokens."""

    BEGINS: ClassVar[str | None]
    """A regular expression of how an answer that is a call begins, in which FUNCTIONS stands for their names;
    None: it is a JSON object of `name` and `parameters`."""

    def __init__(self, functions: Sequence[Function]) -> None: ...
