"""Which parked engines end, so that those of a node keep within their memory."""

from __future__ import annotations

import random

from serve_apps.controller.parking import Parked, too_many


def one(name: str, size: int, since: int, *, node: str = "n", most: int = 10, wanted: bool = True) -> Parked:
    return Parked((name, f"{name}:1", "r"), wanted, node, 1, f"{since:04}", size, most)


def names(parked: list[Parked]) -> list[str]:
    return [name for name, _, _ in too_many(parked)]


def test_those_that_fit_stay() -> None:
    assert names([one("a", 4, 1), one("b", 6, 2)]) == []


def test_the_oldest_goes_first() -> None:
    assert names([one("new", 6, 3), one("old", 4, 1), one("middle", 4, 2)]) == ["old"]


def test_one_that_alone_is_too_large_goes() -> None:
    assert names([one("huge", 11, 9), one("old", 1, 1)]) == ["old", "huge"]


def test_every_node_has_its_own_room() -> None:
    assert names([one("a", 8, 1, node="m"), one("b", 8, 2, node="n")]) == []


def test_who_is_not_wanted_goes_and_makes_room() -> None:
    assert names([one("a", 8, 2, wanted=False), one("b", 8, 1)]) == ["a"]


def test_what_stays_always_fits_and_is_never_older_than_what_goes() -> None:
    draw = random.Random(3)
    for _ in range(300):
        parked = [
            one(str(i), draw.randrange(1, 8), draw.randrange(100), node=draw.choice("mn"))
            for i in range(draw.randrange(9))
        ]
        gone = set(names(parked))
        for node in "mn":
            stays = [each for each in parked if each.node == node and each.key[0] not in gone]
            goes = [each for each in parked if each.node == node and each.key[0] in gone]
            assert sum(each.bytes for each in stays) <= 10
            assert all(s.since >= g.since for s in stays for g in goes)
