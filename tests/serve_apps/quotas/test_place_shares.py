"""Places are shared out so that all that are wanted are given, never more than there are, and evenly."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.quotas.place_shares import PlaceShares, even


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 100))
def test_an_even_part_is_what_is_wanted_or_what_others_have(wants: dict[str, int], capacity: int) -> None:
    given_ = even(wants, capacity)
    assert given_.keys() == wants.keys()
    assert sum(given_.values()) == min(capacity, sum(wants.values()))
    short = [name for name in wants if given_[name] < wants[name]]
    for name in short:
        assert all(given_[other] <= given_[name] + 1 for other in wants)


class Gateway:
    """Fills what its share lets it, of what it would fill."""

    def __init__(self, name: str, shares: PlaceShares) -> None:
        self.name = name
        self.shares = shares
        self.filled = self.share = self.demand = 0

    def report(self, capacity: int) -> None:
        wants = max(self.filled, self.demand)
        self.share = self.shares.share("chat", self.name, in_use=self.filled, want=wants, capacity=capacity)

    def go_on(self, ended: int) -> None:
        self.filled = max(0, self.filled - ended)
        self.filled = max(self.filled, min(self.share, self.demand))


@pytest.mark.parametrize("seed", range(20))
def test_no_more_are_filled_than_there_are_and_after_a_while_each_has_an_even_part(seed: int) -> None:
    chance, shares, capacity = Random(seed), PlaceShares(), 12
    gateways = [Gateway(name, shares) for name in "abc"]
    for _ in range(30):
        for gateway in gateways:
            gateway.demand = chance.choice([0, 1, 5, 40])
        for _ in range(chance.randrange(1, 4)):
            for gateway in chance.sample(gateways, 3):
                if chance.random() < 0.7:  # some reports are late
                    gateway.report(capacity)
                gateway.go_on(chance.randrange(3))
                assert sum(each.filled for each in gateways) <= capacity
    for _ in range(capacity):
        for gateway in gateways:
            gateway.report(capacity)
            gateway.go_on(1)
    wants = {gateway.name: gateway.demand for gateway in gateways}
    assert {gateway.name: gateway.filled for gateway in gateways} == even(wants, capacity)


def test_fewer_places_than_are_filled_let_nobody_in() -> None:
    shares = PlaceShares()
    assert shares.share("chat", "a", in_use=0, want=8, capacity=8) == 8
    assert shares.share("chat", "b", in_use=0, want=4, capacity=8) == 0
    assert shares.share("chat", "a", in_use=8, want=8, capacity=4) == 2
    assert shares.share("chat", "b", in_use=0, want=4, capacity=4) == 0, "eight are filled of four"


def test_what_a_gateway_had_that_is_gone_is_free() -> None:
    shares = PlaceShares()
    shares.share("chat", "a", in_use=8, want=8, capacity=8)
    shares.share("other", "a", in_use=1, want=1, capacity=1)
    shares.keep_only({"chat"}, {"b"})
    assert shares.share("chat", "b", in_use=0, want=8, capacity=8) == 8
    assert shares._holdings.keys() == {"chat"}
