"""Who is inside together, and who is alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from serve_apps.batch.shared_lock import SharedLock


def test_who_wants_to_be_alone_is_and_the_others_are_together() -> None:
    room = SharedLock()
    inside: set[int] = set()
    seen: dict[int, set[int]] = {}
    together = threading.Barrier(4)
    guard = threading.Lock()

    def stay(number: int) -> None:
        alone = number % 5 == 0
        with room.enter(alone=alone):
            with guard:
                inside.add(number)
                for other in inside:
                    seen.setdefault(other, set()).update(inside)
            if not alone:
                # Nobody gets on before four of them are inside at once.
                together.wait(timeout=10)
            with guard:
                inside.discard(number)

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(stay, range(20)))
    assert seen.keys() == set(range(20))
    for number, others in seen.items():
        assert (others == {number}) if number % 5 == 0 else all(other % 5 for other in others)


def test_an_error_inside_lets_the_next_one_in() -> None:
    room = SharedLock()
    for alone in (True, False, True):
        try:
            with room.enter(alone=alone):
                raise KeyError(alone)
        except KeyError:
            pass
    with room.enter(alone=True):
        pass
