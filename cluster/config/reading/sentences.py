"""What pydantic found wrong, as sentences with a place in the file."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cluster.config.reading import schema
from cluster.config.reading.positions import KeyPath, Position, YamlDocument, shorten, show_path
from cluster.config.sections.section import VARIABLE_PATTERN
from cluster.errors import Mistake

MAX_MISTAKES = 300
"""More than these are not put in words; nobody reads on, and a file of rubbish should be answered at once."""


_MOST_COMPARED = 100
_LONGEST_COMPARED = 100


def mistake_at(place: Position, path: KeyPath, given: Any, message: str) -> Mistake:
    """A mistake at a place; one that came from `--set` repeats the text that was given there."""
    if place.setting is not None:
        message += f" (given: --set {shorten(place.setting, 100)})"
    return Mistake(place.file, place.line, place.column, show_path(path), presentable(given), message)


def presentable(given: Any) -> Any:
    """The value as JSON can hold it; NaN and infinity become text, long text is shortened."""
    if isinstance(given, float) and not math.isfinite(given):
        return "nan" if math.isnan(given) else "inf" if given > 0 else "-inf"
    if isinstance(given, str):
        return shorten(given, 200)
    if isinstance(given, dict):
        return {shorten(str(key)): presentable(item) for key, item in list(given.items())[:20]}
    if isinstance(given, list | tuple):
        return [presentable(item) for item in given[:20]]
    return given


def show_value(given: Any) -> str:
    """The value as people write it, in a few words."""
    if given is None:
        return "nothing"
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, str):
        return f'"{shorten(given)}"'
    if isinstance(given, dict):
        return "a section" if given else "an empty section"
    if isinstance(given, list | tuple):
        return f"a list of {len(given)}" if given else "an empty list"
    return shorten(str(presentable(given)))


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that `word` was most likely meant to be (difflib's ratio of at least `cutoff`)."""
    words = list(itertools.islice(known, _MOST_COMPARED))
    if "-" in word and not any("-" in other for other in words):
        word = word.replace("-", "_")  # `warmup-steps`
    found = difflib.get_close_matches(word[:_LONGEST_COMPARED].lower(), words, n=1, cutoff=cutoff)
    return found[0] if found else None


def listed(names: Iterable[str], most: int = 20) -> str:
    """The names joined by commas, the first of them where they are many."""
    shown = [shorten(name) for name in itertools.islice(names, most + 1)]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "") if shown else "none"


def translate(error: ValidationError, document: YamlDocument) -> list[tuple[KeyPath, Mistake]]:
    """Every error of pydantic as a mistake with a place, and the path it is about."""
    # What a value that is wrong leaves undecided is no mistake of its own.
    entries = [one for one in error.errors(include_url=False) if one["type"] != "default_factory_not_called"]
    found: dict[tuple[Position, KeyPath], Mistake] = {}
    for entry in entries[:MAX_MISTAKES]:
        path, place, given, message = _explain(entry, document)
        found.setdefault((place, path), mistake_at(place, path, given, message))
    mistakes = [(path, mistake) for (_, path), mistake in found.items()]
    if len(entries) > MAX_MISTAKES:
        path, place, _, _ = _explain(entries[MAX_MISTAKES], document)
        rest = f"and {len(entries) - MAX_MISTAKES} more mistakes, not listed"
        mistakes.append((path, mistake_at(place, path, None, rest)))
    return mistakes


def _explain(entry: ErrorDetails, document: YamlDocument) -> tuple[KeyPath, Position, Any, str]:
    """The path that one error is about, its place, what was given there, and what is wrong with it."""
    loc, kind = entry["loc"], entry["type"]
    if loc and loc[-1] == "[key]":  # pydantic's own mark for an error in a key; it is no key of the file
        path: KeyPath = loc[:-1]
        return path, document.key_place(path), path[-1], _wrong_key(path, entry)
    if kind == "extra_forbidden":
        return loc, document.key_place(loc), loc[-1], unknown_key(loc)
    if kind == "missing":
        return loc, document.key_place(loc[:-1]), None, _missing(loc)
    return loc, document.value_place(loc), entry["input"], _wrong_value(loc, entry)


def unknown_key(path: KeyPath) -> str:
    """What is wrong with the last key of `path`, and which one was most likely meant."""
    section, word = path[:-1], str(path[-1])
    known = schema.keys_at(section)
    meant = intended(path)
    hint = "" if meant is None else f"; did you mean `{show_path(meant[len(section) :])}`?"
    return f"unknown key `{shorten(word)}`{hint} (known here: {listed(known)})"


def intended(path: KeyPath) -> KeyPath | None:
    """The path that an unknown key was most likely meant to be: a near name, here or one section deeper."""
    section, word = path[:-1], path[-1]
    known = schema.keys_at(section)
    if not isinstance(word, str) or word in known:
        return None
    guess = nearest(word, known)
    if guess is not None:
        return (*section, guess)
    inner = {name: way for way, name in schema.keys_below(section)}
    close = word if word in inner else nearest(word, inner, cutoff=0.8)
    return None if close is None else (*section, *inner[close])


def _missing(path: KeyPath) -> str:
    meaning = schema.describe(path)
    return f"`{path[-1]}` is missing; it should be {schema.allowed(path)}" + (
        f" ({meaning})" if meaning else ""
    )


def _wrong_key(path: KeyPath, entry: ErrorDetails) -> str:
    if entry["type"] == "value_error":
        return _wrong_value(path, entry)
    rule = schema.NAME_RULE
    if entry.get("ctx", {}).get("pattern") == VARIABLE_PATTERN:
        rule = "the name of an environment variable, of letters, digits and `_`"
    return f"should be {rule}, was {show_value(path[-1])}"


def _wrong_value(path: KeyPath, entry: ErrorDetails) -> str:
    given = entry["input"]
    if entry["type"] in ("value_error", "assertion_error"):
        return str(entry["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = f"should be {schema.allowed(path)}, was {show_value(given)}"
    if isinstance(given, str):
        guess = nearest(given, schema.choices(path))
        if guess is not None:
            message += f"; did you mean `{guess}`?"
    if given is None and len(path) > 0:
        message += "; leave the key out for its default"
    return message
