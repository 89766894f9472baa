"""The servers of HAProxy's configuration, which gateways take and leave while it runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal
from urllib.parse import urlsplit

BACKEND = "gateways"
NOWHERE = "192.0.2.1:1"
"""Where a server is that nobody has; an address of no network (RFC 5737)."""
SPARE = 8
"""Servers beside those that the gateways need: one that has died keeps its own for a while."""
OF_ALL = 256
"""Gateways of a cluster that has one on each node."""


def slots_for(count: int | Literal["all"]) -> int:
    """How many servers a configuration needs for so many gateways."""
    return OF_ALL if count == "all" else 2 * count + SPARE


class Slots:
    """Which gateway has which server.

    >>> slots = Slots(3)
    >>> slots.change(["http://10.0.0.1:80"])[0]
    'set server gateways/g0 addr 10.0.0.1 port 80'
    >>> slots.servers()[0], slots.servers()[1]
    ('server g0 10.0.0.1:80 check', 'server g1 192.0.2.1:1 check disabled')
    """

    def __init__(self, number: int) -> None:
        self._urls: list[str | None] = [None] * number

    @property
    def urls(self) -> list[str]:
        """Of the gateways that have one."""
        return [url for url in self._urls if url is not None]

    def change(self, urls: Collection[str]) -> list[str]:
        """What HAProxy is to be told so that it sends requests to these gateways; those for which there is no
        server get none."""
        commands = []
        for slot, url in enumerate(self._urls):
            if url is not None and url not in urls:
                self._urls[slot] = None
                # What it answers still goes on.
                commands.append(f"set server {BACKEND}/g{slot} state maint")
        for url in sorted(set(urls) - set(self.urls)):
            if None not in self._urls:
                break
            slot = self._urls.index(None)
            self._urls[slot] = url
            host, port = _where(url)
            commands += [
                f"set server {BACKEND}/g{slot} addr {host} port {port}",
                f"set server {BACKEND}/g{slot} state ready",
                f"set server {BACKEND}/g{slot} health up",
            ]
        return commands

    def servers(self) -> list[str]:
        """Lines of the configuration."""
        return [
            f"server g{slot} {NOWHERE} check disabled"
            if url is None
            else f"server g{slot} {_address(url)} check"
            for slot, url in enumerate(self._urls)
        ]


def _where(url: str) -> tuple[str, int]:
    split = urlsplit(url)
    assert split.hostname is not None
    assert split.port is not None
    return split.hostname, split.port


def _address(url: str) -> str:
    host, port = _where(url)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
