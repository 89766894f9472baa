"""Which replicas get an engine, on which node, and which give theirs back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serve_apps.controller.engine_places import EngineChanges, EngineState, PlacedEngine, StandingBy, place

NODES = st.sampled_from(["a", "b", "c"])
STATES: st.SearchStrategy[EngineState] = st.sampled_from(["starting", "ready", "ending"])


def engines(*given: tuple[str, str, EngineState]) -> list[PlacedEngine]:
    return [PlacedEngine(*each) for each in given]


def free(**nodes: str) -> list[StandingBy]:
    return [StandingBy(*each) for each in nodes.items()]


def test_an_engine_is_where_it_is_granted_and_beside_its_replica_where_that_can_be() -> None:
    assert place(1, [], free(x="a", y="b"), ["b"]) == EngineChanges((("y", "b"),))
    assert place(1, [], free(x="a"), ["b"]) == EngineChanges((("x", "b"),)), "or on another node"
    both = place(2, [], free(x="a", y="a"), ["a", "b"])
    assert both == EngineChanges((("x", "a"), ("y", "b")))
    assert place(1, [], [], ["b"]) == EngineChanges(), "nobody stands by yet"
    assert place(1, [], free(x="a"), []) == EngineChanges(), "nothing is granted"


def test_of_too_many_the_last_goes_and_those_that_start_before() -> None:
    there = engines(("x", "a", "ready"), ("y", "b", "ready"))
    assert place(1, there, [], ["a", "b"]) == EngineChanges(ends=("y",))
    starting = engines(("x", "a", "starting"), ("y", "b", "ready"))
    assert place(1, starting, [], ["a", "b"]) == EngineChanges(ends=("x",))
    assert place(0, there, [], ["a", "b"]) == EngineChanges(ends=("x", "y"))


def test_one_that_has_to_move_goes_when_another_is_there() -> None:
    old = ("x", "a", "ready")
    assert place(1, engines(old), free(y="b"), ["b"]) == EngineChanges((("y", "b"),))
    assert place(1, engines(old, ("y", "b", "starting")), [], ["b"]) == EngineChanges()
    assert place(1, engines(old, ("y", "b", "ready")), [], ["b"]) == EngineChanges(ends=("x",))
    assert place(1, engines(("x", "a", "starting")), free(y="b"), ["b"]) == EngineChanges(
        (("y", "b"),), ("x",)
    )


def test_one_on_a_dead_node_goes_on_only_while_another_is_coming_in_its_place() -> None:
    old = engines(("x", "a", "ready"), ("z", "c", "ready"))
    assert place(2, old, free(y="b"), ["c", "b"], dead={"a"}) == EngineChanges((("y", "b"),))
    assert place(2, old, [], ["c", "b"], dead={"a"}) == EngineChanges(), "one will stand by soon"
    starting = [*old, *engines(("y", "b", "starting"))]
    assert place(2, starting, [], ["c", "b"], dead={"a"}) == EngineChanges()
    assert place(2, old, free(y="b"), ["c"], dead={"a"}) == EngineChanges(ends=("x",)), "no room elsewhere"
    assert place(2, old, None, ["c", "b"], dead={"a"}) == EngineChanges(ends=("x",)), "the other has failed"
    assert place(2, starting, None, ["c", "b"], dead={"a"}) == EngineChanges()
    assert place(2, old, free(y="b"), ["c"]) == EngineChanges(), "its node is there, and going"
    both = engines(("x", "a", "ready"), ("w", "a", "ready"), ("y", "b", "starting"))
    assert place(2, both, [], ["b"], dead={"a"}) == EngineChanges(ends=("w",)), "one for each that comes"


def test_what_one_that_ends_has_is_not_free_yet() -> None:
    ending = engines(("x", "a", "ending"))
    assert place(1, ending, free(y="a"), ["a"]) == EngineChanges()
    assert place(1, ending, free(y="a"), ["a", "a"]) == EngineChanges((("y", "a"),))


@given(
    size=st.integers(0, 4),
    placed=st.lists(st.tuples(NODES, STATES), max_size=5),
    standing=st.lists(NODES, max_size=5),
    granted=st.lists(NODES, max_size=5),
)
def test_never_more_than_granted_and_it_comes_to_an_end(
    size: int, placed: list[tuple[str, EngineState]], standing: list[str], granted: list[str]
) -> None:
    there = [PlacedEngine(f"e{n}", node, state) for n, (node, state) in enumerate(placed)]
    stand = [StandingBy(f"s{n}", node) for n, node in enumerate(standing)]
    for _ in range(8):
        changes = place(size, there, stand, granted)
        assert not {replica for replica, _ in changes.starts} & {each.replica for each in there}
        assert len({replica for replica, _ in changes.starts}) == len(changes.starts)
        held = Counter(each.node for each in there)
        started = Counter(node for _, node in changes.starts)
        for node, count in started.items():
            assert held[node] + count <= granted.count(node), "more than was granted"
        ready = [each for each in there if each.state == "ready"]
        left = [each for each in ready if each.replica not in changes.ends]
        assert len(left) >= min(size, len(ready)), "one that answers went though it was wanted"
        if not changes.starts and not changes.ends and all(e.state == "ready" for e in there):
            break
        # Orders are carried out: who ends is gone, who starts is ready, and those stand by again.
        gone = [e for e in there if e.state == "ending" or e.replica in changes.ends]
        stand = [s for s in stand if s.replica not in {replica for replica, _ in changes.starts}]
        stand += [StandingBy(each.replica, each.node) for each in gone]
        there = [PlacedEngine(e.replica, e.node, "ready") for e in there if e not in gone]
        there += [PlacedEngine(replica, node, "ready") for replica, node in changes.starts]
    else:
        raise AssertionError("it does not come to rest")
    assert len(there) <= max(size, 0)
    if len(stand) + len(there) >= size:
        assert len(there) >= min(size, len(granted)), "less than could be had"
