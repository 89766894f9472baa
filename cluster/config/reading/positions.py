"""A config file as a tree in which every key and value knows its line and column; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import Mistake

KeyPath = tuple[str | int, ...]
"""Keys and list indexes from the file's top."""


@dataclass(frozen=True)
class Position:
    """Where something was written: a file's line and column (from 1), or the `--set` that gave it."""

    file: str
    line: int | None = None
    column: int | None = None
    setting: str | None = None
    """The text of the `--set` option."""


@dataclass(frozen=True)
class Item:
    """A value, where it starts, and how many values it is made of."""

    place: Position
    value: bool | int | float | str | tuple[Item, ...] | Mapping[str, YamlEntry] | None
    size: int = 1

    def plain(self) -> Any:
        """The value as dicts, lists and scalars."""
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        if isinstance(self.value, Mapping):
            return {key: entry.item.plain() for key, entry in self.value.items()}
        return self.value

    def child(self, step: str | int) -> tuple[Position, Item] | None:
        """The place of a key (or of a list element) and its value; None where there is no such one."""
        if isinstance(self.value, Mapping):
            entry = self.value.get(step) if isinstance(step, str) else None
            return None if entry is None else (entry.place, entry.item)
        if isinstance(self.value, tuple) and isinstance(step, int) and 0 <= step < len(self.value):
            return self.value[step].place, self.value[step]
        return None


@dataclass(frozen=True)
class YamlEntry:
    """One key of a mapping: where the key stands, and its value."""

    place: Position
    item: Item


@dataclass(frozen=True)
class YamlDocument:
    """A config file that was read: its values with their places, and what was wrong on the way."""

    file: str
    root: Item
    mistakes: tuple[Mistake, ...] = field(default_factory=tuple)

    def find(self, path: KeyPath) -> tuple[Position, Item, bool]:
        """The key's place, the value, and whether the path is there; else those of the nearest above."""
        place, item = self.root.place, self.root
        for step in path:
            found = item.child(step)
            if found is None:
                return place, item, False
            place, item = found
        return place, item, True

    def key_place(self, path: KeyPath) -> Position:
        """Where the last key of `path` stands, or the nearest key above it that is written."""
        return self.find(path)[0]

    def value_place(self, path: KeyPath) -> Position:
        """Where the value at `path` starts; where it is not written, the nearest key above it."""
        place, item, there = self.find(path)
        # An empty value (`steps:`) starts nowhere in particular: the key is what people look for.
        return item.place if there and item.value is not None else place


def show_path(path: KeyPath) -> str:
    """`train_jobs.stdlib-lm.steps`; keys that would break the line are escaped and shortened."""
    return ".".join(shorten(str(step)) for step in path)


def shorten(text: str, most: int = 60) -> str:
    """The text on one line, printable, and not longer than `most`."""
    cut = text[:most] + "…" if len(text) > most else text
    return cut if cut.isprintable() else repr(cut)[1:-1]
