"""Environment variables that a config names."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.errors import RequestError


def passed_on(wanted: Mapping[str, str | None], caller: Mapping[str, str], key: str) -> dict[str, str]:
    """Variables with their values, those of the caller where none is said.

    Raises:
        RequestError: the caller has no such value; the message says so of this key of the config.
    """
    missing = [name for name, value in wanted.items() if value is None and name not in caller]
    if missing:
        names = ", ".join(missing)
        raise RequestError(f"{key}: {names} should be passed on (null in the config), and is not set here")
    return {name: caller[name] if value is None else value for name, value in wanted.items()}
