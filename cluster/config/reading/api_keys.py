"""API keys: whose they are, which apps they open, and how much they may ask for.

Only digests are kept: a key is a random number of 256 bits, for which SHA-256 without salt is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from cluster.errors import RequestError

ENVIRONMENT = "env:"
PREFIX = "sk-shoal-"
"""How every key begins, so that people and scanners know one when they see it."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Key(BaseModel):
    """One entry of a key file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    sha256: Digest
    """SHA-256 of the key, in hexadecimal."""
    tenant: str = Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9._-]+$")
    """Who it belongs to; limits hold for all keys of a tenant with the same limits together."""
    apps: tuple[str, ...] | None = Field(default=None, strict=False)
    """Apps that it opens. Default: all."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers together."""
    metrics: bool = False
    """Whether it opens the gateway's own figures, which tell of all apps: /metrics and /load."""

    def opens(self, app: str) -> bool:
        """Whether it may ask an app."""
        return self.apps is None or app in self.apps


_KEYS = TypeAdapter(list[Key])


def new_key() -> str:
    """A new key; it is shown once and kept nowhere."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What a key file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str, source: str) -> KeyRing:
    """The keys of a file's text: a YAML or JSON list of entries.

    Args:
        source: what people know the text by, for the error.

    Raises:
        RequestError: it is none; never with what an entry holds.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        document = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise RequestError(f"{source} is not valid YAML") from error
    try:
        return KeyRing(_KEYS.validate_python(document if document is not None else []))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"]) or "the file"
        raise RequestError(f"{source}: {place}: {first['msg']}") from None


def load_keys(source: str) -> KeyRing:
    """The keys of a file, or of the environment variable that `env:NAME` names.

    Raises:
        RequestError: there is no such file or variable, or what it holds is no list of keys.
    """
    return parse_keys(read_keys(source), source)


def read_keys(source: str) -> str:
    """The text that `load_keys` parses.

    Raises:
        RequestError: there is no such file or variable.
    """
    if source.startswith(ENVIRONMENT):
        name = source.removeprefix(ENVIRONMENT)
        text = os.environ.get(name)
        if text is None:
            raise RequestError(f"{source}: the environment has no variable {name}")
        return text
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text"
        raise RequestError(f"{source} cannot be read: {reason}") from error


class KeyRing:
    """All keys of a gateway."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def from_json(cls, entries: list[dict[str, Any]]) -> KeyRing:
        """The keys that `as_json` has told."""
        return cls(_KEYS.validate_python(entries))

    def as_json(self) -> list[dict[str, Any]]:
        """Each as a key file has it."""
        return [key.model_dump(exclude_defaults=True) for key in self._keys]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, authorization: str) -> Key | None:
        """The key of an `Authorization` header (`Bearer …`); None for any that is not known.

        Takes the same time whichever key it is, or none.
        """
        scheme, _, presented = authorization.partition(" ")
        digest = digest_of(presented.strip())
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest) and scheme.lower() == "bearer":
                found = key
        return found


def add_entry(text: str, key: Key) -> str:
    """A key file's text with one more entry; comments stay."""
    entry = json.dumps(key.model_dump(exclude_none=True, exclude_defaults=True))
    if text.lstrip().startswith("["):
        return json.dumps([*json.loads(text), json.loads(entry)], indent=2) + "\n"
    separator = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{separator}- {entry}\n"


def cluster_token() -> str | None:
    """The token of the cluster that this process belongs to, by the variables that Ray reads it from."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if "RAY_AUTH_TOKEN" in os.environ or path is None:
        return os.environ.get("RAY_AUTH_TOKEN")
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
