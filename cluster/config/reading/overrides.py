"""`--set KEY=VALUE`: values given on the command line, laid over the file before it is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.config.reading import schema
from cluster.config.reading.positions import (
    Item,
    KeyPath,
    Position,
    YamlDocument,
    YamlEntry,
    shorten,
    show_path,
)
from cluster.config.reading.sentences import listed, mistake_at, nearest
from cluster.config.reading.yaml_reader import MAX_DEPTH, read_yaml
from cluster.errors import ConfigError, Mistake

SETTING_FILE = "--set"
_SEGMENT = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."'=]+?))\s*(?:\.|$)""")


class _SettingError(Exception):
    """One `--set` cannot be laid over the file."""

    def __init__(self, message: str, path: KeyPath = ()) -> None:
        super().__init__(message)
        self.message, self.path = message, path


def apply_overrides(document: YamlDocument, settings: Sequence[str], scope: KeyPath = ()) -> YamlDocument:
    """The document with every setting laid over it, in order; what is wrong with them is in `mistakes`.

    A key is a path from the file's top, or from `scope` where it does not start with a section of the
    file. Names that hold dots are found as they are (`train_jobs.my.job.steps`) or may be quoted; list
    elements go by their index (`cluster.nodes.1.cpus`).
    """
    mistakes = list(document.mistakes)
    root = document.root
    for setting in settings:
        place = Position(SETTING_FILE, setting=setting)
        try:
            root = _apply(root, setting, place, scope, mistakes)
        except _SettingError as error:
            mistakes.append(mistake_at(place, error.path, setting, error.message))
        except ConfigError as error:
            mistakes.extend(_in_setting(mistake, setting) for mistake in error.mistakes)
    return replace(document, root=root, mistakes=tuple(mistakes))


def _in_setting(mistake: Mistake, setting: str) -> Mistake:
    message = f"{mistake.message} (given: --set {shorten(setting, 100)})"
    return replace(
        mistake, path=shorten(setting.partition("=")[0]), given=shorten(setting, 200), message=message
    )


def _apply(root: Item, setting: str, place: Position, scope: KeyPath, mistakes: list[Mistake]) -> Item:
    key, equals, text = setting.partition("=")
    if not equals:
        raise _SettingError("should be KEY=VALUE, for example train_jobs.NAME.steps=10")
    segments = _split(key)
    read = read_yaml(text, place)
    mistakes.extend(_in_setting(mistake, setting) for mistake in read.mistakes)
    start = () if segments[0] in schema.keys_at(()) else scope
    path = _resolve(root, start, segments, read.root)
    return _with_value(root, (), path, read.root, place)


def _split(key: str) -> list[str]:
    segments: list[str] = []
    at = 0
    text = key.strip()
    while True:
        found = _SEGMENT.match(text, at)
        if found is None or len(segments) >= MAX_DEPTH:
            raise _SettingError(
                f"the key `{shorten(key)}` should be names joined by dots, for example train_jobs.NAME.steps"
            )
        segments.append(next(part for part in found.groups() if part is not None))
        at = found.end()
        if at >= len(text):
            if text.endswith("."):
                raise _SettingError(f"the key `{shorten(key)}` ends with a dot; name what comes after it")
            return segments


def _resolve(root: Item, start: KeyPath, segments: list[str], value: Item) -> KeyPath:
    """The path that the segments name; a name with dots is one step, and list indexes are numbers."""
    path = start
    left = list(segments)
    while left:
        item: Item | None = root
        for step in path:
            found = None if item is None else item.child(step)
            item = None if found is None else found[1]
        step, used = _step(item, path, left, value)
        path = (*path, step)
        left = left[used:]
    return path


def _step(item: Item | None, path: KeyPath, left: list[str], value: Item) -> tuple[str | int, int]:
    """The next step of the path, and how many segments it takes."""
    inside = None if item is None else item.value
    if isinstance(inside, Mapping):
        for used in range(len(left), 0, -1):
            if ".".join(left[:used]) in inside:
                return ".".join(left[:used]), used
    if schema.is_named_table(path) and (inside is None or isinstance(inside, Mapping)):
        if isinstance(value.value, Mapping):
            return ".".join(left), len(left)  # a whole new entry
        raise _SettingError(no_such_entry(path, left[0], list(inside or ())), (*path, left[0]))
    if isinstance(inside, tuple) or (inside is None and _default_list(path) is not None):
        entries = len(inside) if isinstance(inside, tuple) else len(_default_list(path) or ())
        if left[0].isdecimal() and len(left[0]) < 10 and int(left[0]) < entries:
            return int(left[0]), 1
        raise _SettingError(
            f"`{show_path(path)}` is a list of {entries}; name one by its index, 0 to {entries - 1}",
            (*path, left[0]),
        )
    if inside is not None and not isinstance(inside, Mapping):
        raise _SettingError(f"`{show_path(path)}` is not a section, so it has no `{shorten(left[0])}`", path)
    return left[0], 1


def no_such_entry(path: KeyPath, name: str, known: list[str]) -> str:
    """What is wrong with a job or app that the file does not have."""
    noun = {"train_jobs": "job", "serve_apps": "app"}.get(str(path[-1]), "entry")
    guess = nearest(name, known)
    hint = f"; did you mean `{guess}`?" if guess is not None else ""
    return f"there is no {noun} `{shorten(name)}`{hint} (the file has: {listed(known)})"


def _default_list(path: KeyPath) -> Sequence[Any] | None:
    """The list that stands at `path` when the file does not give one."""
    node = schema.node_at(path)
    default = None if node is None else node.get("default")
    return default if isinstance(default, list) else None


def _with_value(item: Item | None, at: KeyPath, path: KeyPath, value: Item, place: Position) -> Item:
    """The item with `value` at `path`; sections on the way are made where they are missing."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        elements = item.value if item is not None and isinstance(item.value, tuple) else None
        if elements is None:
            elements = tuple(_made(element, place) for element in _default_list(at) or ())
        changed = _with_value(elements[step], (*at, step), rest, value, place)
        return Item(
            item.place if item is not None else place, (*elements[:step], changed, *elements[step + 1 :])
        )
    entries = dict(item.value) if item is not None and isinstance(item.value, Mapping) else {}
    before = entries.get(step)
    below = _with_value(before.item if before is not None else None, (*at, step), rest, value, place)
    entries[step] = YamlEntry(before.place if before is not None and rest else place, below)
    return Item(item.place if item is not None else place, entries)


def _made(plain: Any, place: Position) -> Item:
    """Plain data as items that all stand at one place."""
    if isinstance(plain, dict):
        return Item(place, {key: YamlEntry(place, _made(inner, place)) for key, inner in plain.items()})
    if isinstance(plain, list):
        return Item(place, tuple(_made(inner, place) for inner in plain))
    return Item(place, plain)
