"""Reads a YAML text into a tree with positions, and turns all that is wrong with it into sentences."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from ruamel.yaml.nodes import ScalarNode

from cluster.config.reading.positions import (
    Item,
    KeyPath,
    Position,
    YamlDocument,
    YamlEntry,
    shorten,
    show_path,
)
from cluster.errors import ConfigError, Mistake

MAX_DEPTH = 50
MAX_LINE_LENGTH = 100_000
MAX_LINES = 20_000
MAX_EVENTS = 20_000
MAX_INTEGER_BITS = 1024
MAX_ITEMS = 20_000
"""Values in a file after its aliases are followed."""
MAX_MISTAKES = 1000

_PARSER_FAILURES = (
    YAMLError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)

_CORE = "tag:yaml.org,2002:"
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _StopReadingError(Exception):
    """The text cannot be read further; what was found so far stands."""

    def __init__(self, place: Position, message: str, path: KeyPath = (), given: Any = None) -> None:
        super().__init__(message)
        self.place, self.message, self.path, self.given = place, message, path, given


def read_yaml(text: str, place: Position) -> YamlDocument:
    """Read one YAML document; duplicate keys and the like are collected in `YamlDocument.mistakes`.

    `place` says where the text starts; for a `--set` value all positions are that place itself.

    Raises:
        ConfigError: the text is not one YAML document, or one too deep or too large for a config.
    """
    composer = _Composer(text, place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser's remarks on YAML 1.1 help nobody here
            root = composer.document()
    except _StopReadingError as stop:
        last = Mistake(
            stop.place.file,
            stop.place.line,
            stop.place.column,
            show_path(stop.path),
            stop.given,
            stop.message,
        )
        raise ConfigError([*composer.mistakes, last]) from stop
    return YamlDocument(place.file, root, tuple(composer.mistakes))


class _Composer:
    """Builds items from the parser's events, so that depth and size are known before they cost anything."""

    def __init__(self, text: str, start: Position) -> None:
        self.text = text
        self.start = start
        self.mistakes: list[Mistake] = []
        self._events = self._guarded()
        self._anchors: dict[str, Item | None] = {}
        self._items = 0
        self._yaml = YAML(typ="safe", pure=True)

    def document(self) -> Item:
        self._check_text()
        self._next()  # the start of the stream
        first = self._next()
        if isinstance(first, StreamEndEvent):
            return Item(self.start, None)
        root = self._item(self._next(), (), 1)
        self._next()  # the end of the document
        after = self._next()
        if isinstance(after, DocumentStartEvent):
            raise _StopReadingError(
                self._place(after), "holds more than one YAML document; keep one, without a second `---`"
            )
        return root

    def _check_text(self) -> None:
        bad = _UNPRINTABLE.search(self.text)
        if bad is not None:
            line = self.text.count("\n", 0, bad.start()) + 1
            column = bad.start() - self.text.rfind("\n", 0, bad.start())
            raise _StopReadingError(
                self._at(line, column), f"is not text: it holds the control character U+{ord(bad[0]):04X}"
            )
        lines = self.text.split("\n")
        if len(lines) > MAX_LINES:
            raise _StopReadingError(self.start, f"has {len(lines)} lines; a config has at most {MAX_LINES}")
        for line, content in enumerate(lines, 1):
            if len(content) > MAX_LINE_LENGTH:
                raise _StopReadingError(
                    self._at(line, 1),
                    f"has a line of {len(content)} characters; a config's line has at most {MAX_LINE_LENGTH}",
                )

    def _at(self, line: int, column: int) -> Position:
        return self.start if self.start.setting is not None else Position(self.start.file, line, column)

    def _place(self, event: Event) -> Position:
        mark = event.start_mark
        return self._at(mark.line + 1, mark.column + 1)

    def _guarded(self) -> Iterator[Event]:
        """The parser's events; whatever the parser cannot read becomes one sentence."""
        count = 0
        try:
            for event in self._yaml.parse(StringIO(self.text)):
                count += 1
                if count > MAX_EVENTS:
                    raise _StopReadingError(
                        self._place(event),
                        f"holds more than {MAX_EVENTS} keys and values; a config has fewer",
                    )
                yield event
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = self.start if mark is None else self._at(mark.line + 1, mark.column + 1)
            raise _StopReadingError(place, self._syntax_sentence(error, place)) from error
        except _PARSER_FAILURES as error:
            # The parser gives up with these on some malformed escapes, tags and directives.
            raise _StopReadingError(
                self.start, "is not YAML (a malformed escape, tag or directive)"
            ) from error

    def _syntax_sentence(self, error: MarkedYAMLError, place: Position) -> str:
        problem = str(error.problem or "")
        context = str(error.context or "")
        lines = self.text.split("\n")
        line = lines[place.line - 1] if place.line is not None and place.line <= len(lines) else ""
        if "'\\t'" in problem or "\t" in line[: len(line) - len(line.lstrip())]:
            return "is not YAML: a tab is used where YAML wants spaces"
        for words, sentence in _SYNTAX_SENTENCES:
            if words in problem or words in context:
                return f"is not YAML: {sentence}"
        return f"is not YAML: {shorten(problem or context, 120)}"

    def _next(self) -> Event:
        return next(self._events)

    def _note(self, place: Position, path: KeyPath, given: Any, message: str) -> None:
        if len(self.mistakes) >= MAX_MISTAKES:
            raise _StopReadingError(place, f"has more than {MAX_MISTAKES} mistakes; the rest is not shown")
        self.mistakes.append(Mistake(place.file, place.line, place.column, show_path(path), given, message))

    def _count(self, number: int, place: Position, path: KeyPath) -> None:
        self._items += number
        if self._items > MAX_ITEMS:
            raise _StopReadingError(
                place, f"its aliases (`*name`) expand to more than {MAX_ITEMS} values; write them out", path
            )

    def _item(self, event: Event, path: KeyPath, depth: int) -> Item:
        place = self._place(event)
        if depth > MAX_DEPTH:
            raise _StopReadingError(
                place, f"is nested more than {MAX_DEPTH} levels deep; a config needs fewer than ten"
            )
        if isinstance(event, AliasEvent):
            return self._alias(event, place, path)
        assert isinstance(event, NodeEvent)  # nothing else can stand where a value is
        anchor = event.anchor
        if anchor:
            self._anchors[anchor] = None  # known, not finished: an alias inside of it would never end
        self._count(1, place, path)
        if isinstance(event, SequenceStartEvent):
            item = self._sequence(place, path, depth)
        elif isinstance(event, MappingStartEvent):
            item = self._mapping(place, path, depth)
        else:
            assert isinstance(event, ScalarEvent)
            item = Item(place, self._scalar(event, place, path))
        if isinstance(event, CollectionStartEvent) and event.tag and event.tag not in _COLLECTION_TAGS:
            self._note(
                place, path, shorten(event.tag), "carries a YAML tag (`!…`), which has no meaning here"
            )
        if anchor:
            self._anchors[anchor] = item
        return item

    def _alias(self, event: AliasEvent, place: Position, path: KeyPath) -> Item:
        name = event.anchor
        shown = shorten(str(name))
        if name not in self._anchors:
            raise _StopReadingError(
                place, f"the alias `*{shown}` has no anchor `&{shown}` before it", path, f"*{shown}"
            )
        item = self._anchors[name]
        if item is None:
            raise _StopReadingError(
                place, f"the alias `*{shown}` is inside of its own anchor", path, f"*{shown}"
            )
        self._count(item.size, place, path)
        return item

    def _sequence(self, place: Position, path: KeyPath, depth: int) -> Item:
        items: list[Item] = []
        while not isinstance(event := self._next(), SequenceEndEvent):
            items.append(self._item(event, (*path, len(items)), depth + 1))
        return Item(place, tuple(items), 1 + sum(item.size for item in items))

    def _mapping(self, place: Position, path: KeyPath, depth: int) -> Item:
        entries: dict[str, YamlEntry] = {}
        merged: list[Item] = []
        while not isinstance(event := self._next(), MappingEndEvent):
            key_place = self._place(event)
            merges = isinstance(event, ScalarEvent) and event.value == "<<" and event.implicit[0]
            key_item = self._item(event, path, depth + 1)
            key = key_item.value
            if not isinstance(key, str):
                # The value is read all the same, for the mistakes in it.
                self._item(self._next(), (*path, _shown_key(key_item)), depth + 1)
                self._note(
                    key_place, path, _shown_key(key_item), f"a key should be text, was {_key_kind(key_item)}"
                )
                continue
            value = self._item(self._next(), (*path, key), depth + 1)
            if merges:
                merged.extend(value.value if isinstance(value.value, tuple) else [value])
            elif key in entries:
                self._note(key_place, (*path, key), key, _twice((*path, key), entries[key].place))
            else:
                entries[key] = YamlEntry(key_place, value)
        for source in merged:
            if not isinstance(source.value, Mapping):
                self._note(source.place, (*path, "<<"), None, "`<<` merges sections, and this is none")
                continue
            for key, entry in source.value.items():
                entries.setdefault(key, entry)
        return Item(place, entries, 1 + sum(entry.item.size for entry in entries.values()))

    def _scalar(self, event: ScalarEvent, place: Position, path: KeyPath) -> bool | int | float | str | None:
        if event.tag and event.tag not in _SCALAR_TAGS and event.tag != "!":
            self._note(
                place, path, shorten(event.tag), "carries a YAML tag (`!…`), which has no meaning here"
            )
            return str(event.value)
        text = str(event.value)
        bad = _UNPRINTABLE.search(text)
        if bad is not None:
            self._note(
                place,
                path,
                shorten(text),
                f"holds the control character U+{ord(bad[0]):04X}, which has no place here",
            )
            return shorten(text)
        tag = event.tag or self._yaml.resolver.resolve(ScalarNode, event.value, event.implicit)
        kind = str(tag).removeprefix(_CORE)
        if kind not in ("null", "bool", "int", "float"):
            return text  # dates too: no key of the config is a date
        try:
            node = ScalarNode(tag, event.value, event.start_mark, event.end_mark)
            if kind == "null":
                return None
            construct = getattr(self._yaml.constructor, f"construct_yaml_{kind}")
            value: bool | int | float = construct(node)
            if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError("too many digits")
        except (ValueError, LookupError, YAMLError):
            # Thousands of digits, or a tag that the text does not fit.
            self._note(place, path, shorten(text), f"is not a number that can be used: {shorten(text)}")
            return shorten(text)
        return value


_SCALAR_TAGS = frozenset(_CORE + kind for kind in ("null", "bool", "int", "float", "str"))
_COLLECTION_TAGS = frozenset((_CORE + "map", _CORE + "seq", "!"))

_SYNTAX_SENTENCES = (
    ("mapping values are not allowed", "a second `:` on the line, or an indentation that does not fit"),
    ("while scanning a quoted scalar", "a quote is opened and not closed, or an escape in it is malformed"),
    ("while parsing a flow sequence", "a `,` or the closing `]` is missing"),
    ("while parsing a flow mapping", "a `,` or the closing `}` is missing"),
    ("while parsing a flow node", "a value, or the closing `]` or `}`, is missing"),
    ("could not find expected ':'", "a key without its `:`"),
    ("while parsing a block mapping", "the line does not fit the ones above it (its indentation, or a `:`)"),
    (
        "while parsing a block collection",
        "the line does not fit the list above it (its indentation, or a `-`)",
    ),
    ("cannot start any token", "a character that needs quotes around the value"),
    ("document start", "the line does not fit the ones above it"),
)


def _shown_key(item: Item) -> str:
    value = item.value
    if isinstance(value, tuple):
        return "[…]"
    if isinstance(value, Mapping):
        return "{…}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shorten(str(value))


def _key_kind(item: Item) -> str:
    value = item.value
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "a section"
    if value is None:
        return "nothing (null)"
    return f'{_shown_key(item)}; put it in quotes: "{_shown_key(item)}"'


def _twice(path: KeyPath, first: Position) -> str:
    where = f"on line {first.line}" if first.line is not None else "before"
    nouns = {"train_jobs": "jobs", "serve_apps": "apps"}
    if len(path) == 2 and path[0] in nouns:
        return f"two {nouns[str(path[0])]} are called `{shorten(str(path[1]))}`; the first is {where}"
    return f"the key `{shorten(str(path[-1]))}` is given twice; it was first given {where}"
