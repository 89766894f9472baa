"""How often this process has sent requests to replicas, and why there.

Serve makes the routers, and hands nothing in that could tell others what they do: so this is the process's,
as a logger is.
"""

from __future__ import annotations

from collections import Counter

Routed = tuple[str, str, str]
"""App, policy, and the policy's reason."""

_routed: Counter[Routed] = Counter()


def note(app: str, policy: str, reason: str) -> None:
    """A request was sent to a replica."""
    _routed[app, policy, reason] += 1


def decisions() -> dict[Routed, int]:
    """The requests that were sent, since the process began."""
    return dict(_routed)
