"""Gateways come and go, and each has the server that it is said to have."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from serve_apps.front.slots import OF_ALL, Slots, slots_for

SET = re.compile(r"set server gateways/g(\d+) (?:addr (\S+) port (\d+)|state (ready|maint)|health up)")


class Told:
    """What a HAProxy knows that was told so."""

    def __init__(self, number: int) -> None:
        self.addresses: list[str] = [""] * number
        self.ready = [False] * number

    def hear(self, command: str) -> None:
        found = SET.fullmatch(command)
        assert found is not None, command
        slot = int(found[1])
        if found[2] is not None:
            assert not self.ready[slot], "a server that gets requests is given to another gateway"
            self.addresses[slot] = f"http://{found[2]}:{found[3]}"
        elif found[4] is not None:
            self.ready[slot] = found[4] == "ready"


urls = st.sets(st.integers(1, 30).map(lambda n: f"http://10.0.0.{n}:80"), max_size=12)


@given(st.lists(urls, max_size=20))
def test_requests_go_to_those_that_are_there_and_to_nobody_else(changes: list[set[str]]) -> None:
    slots, told = Slots(12), Told(12)
    for there in changes:
        for command in slots.change(there):
            told.hear(command)
        serving = [url for url, ready in zip(told.addresses, told.ready, strict=True) if ready]
        assert sorted(serving) == sorted(there) == sorted(slots.urls)
        servers = slots.servers()
        assert sum("disabled" not in server for server in servers) == len(there)
        assert slots.change(there) == []


def test_more_gateways_than_servers_leave_some_without() -> None:
    slots = Slots(2)
    slots.change([f"http://10.0.0.{n}:80" for n in range(5)])
    assert len(slots.urls) == 2


def test_an_address_of_ipv6_is_told_as_haproxy_reads_it() -> None:
    slots = Slots(1)
    assert slots.change(["http://[fd00::1]:80"])[0] == "set server gateways/g0 addr fd00::1 port 80"
    assert slots.servers() == ["server g0 [fd00::1]:80 check"]


def test_there_are_servers_for_gateways_that_die_and_come_back() -> None:
    assert slots_for(1) >= 4
    assert slots_for(100) >= 200
    assert slots_for("all") == OF_ALL
