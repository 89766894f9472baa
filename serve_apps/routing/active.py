"""Which replicas have an engine: only they are given requests, of all that Serve has of an application. And
how many gateways give them any.

Serve makes the routers, and hands nothing in: so this is the process's, as `decisions` are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping

_active: Mapping[str, frozenset[str]] = {}
"""The ids of the replicas, by Serve application. Replaced as a whole: routers read it in another thread."""
_gateways = 1
_listeners: set[weakref.WeakMethod[Callable[[], None]]] = set()


def tell_active(replicas: Mapping[str, Collection[str]]) -> None:
    """From now on these replicas have an engine, by Serve application."""
    global _active
    _active = {application: frozenset(each) for application, each in replicas.items()}
    for listener in list(_listeners):
        if (told := listener()) is None:
            _listeners.discard(listener)
        else:
            told()


def tell_gateways(number: int) -> None:
    """From now on so many gateways send requests to the same replicas."""
    global _gateways
    _gateways = number


def gateways() -> int:
    """How many gateways send requests to the replicas, this one too."""
    return max(1, _gateways)


def on_news(listener: Callable[[], None]) -> None:
    """From now on this method is called after `tell_active`, in its thread, as long as its object lasts."""
    _listeners.add(weakref.WeakMethod(listener))


def is_active(application: str, replica: str) -> bool:
    """Whether a replica may be given a request; of an application that nobody has told of, each may."""
    active = _active.get(application)
    return active is None or replica in active
