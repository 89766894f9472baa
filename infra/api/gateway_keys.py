"""Making API keys of the gateway, in the file that the config names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config.reading.api_keys import ENVIRONMENT, Key, add_entry, digest_of, new_key, parse_keys
from cluster.errors import RequestError
from cluster.state.state_directory import write_private


def add_key(source: str | None, entry: dict[str, Any]) -> str:
    """Make a key and add it to the file; a running gateway takes it at once. The key, which is kept nowhere.

    Args:
        source: `cluster.gateway.keys`, paths resolved.
        entry: what the file is to say of it: tenant, apps, requests_per_minute, tokens_per_minute, metrics.

    Raises:
        RequestError: the config names no file, its text is none of keys, or the entry cannot be one.
    """
    if source is None or source.startswith(ENVIRONMENT):
        raise RequestError("the config's cluster.gateway.keys names no file that a key could be added to")
    secret = new_key()
    try:
        key = Key(sha256=digest_of(secret), **entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RequestError(f"{first['loc'][0]}: {first['msg']}") from error
    path = Path(source)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parse_keys(text, source)
    os.makedirs(path.parent, exist_ok=True)
    write_private(path, add_entry(text, key))
    return secret
