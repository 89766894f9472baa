"""Which nodes have a gateway: as many as there are to be, and they stay where they are."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from cluster.state.nodes import NodeState
from serve_apps.controller.gateway_places import gateway_nodes


def node(name: str, *, alive: bool = True) -> NodeState:
    return NodeState(name, f"id-{name}", alive, name == "head", {}, {})


FOUR = [node("head"), node("c"), node("a"), node("b", alive=False)]


def test_the_head_has_one_always_and_others_by_their_names() -> None:
    assert gateway_nodes(1, FOUR) == ()
    assert gateway_nodes(2, FOUR) == ("id-a",)
    assert gateway_nodes(9, FOUR) == gateway_nodes("all", FOUR) == ("id-a", "id-c")
    assert gateway_nodes("all", FOUR, unfit={"id-a"}) == ("id-c",)


names = st.sets(st.sampled_from("abcdefgh"), max_size=8)


@given(names, names, names, st.integers(1, 8) | st.just("all"))
def test_one_that_is_there_stays_while_its_node_does(
    before: set[str], after: set[str], unfit: set[str], count: int | Literal["all"]
) -> None:
    head = node("head")
    now = gateway_nodes(count, [head, *map(node, before)])
    then = gateway_nodes(count, [head, *map(node, after)], {f"id-{name}" for name in unfit}, now)
    fit = {f"id-{name}" for name in after - unfit}
    assert len(then) == len(set(then)) == (len(fit) if count == "all" else min(count - 1, len(fit)))
    assert set(then) <= fit
    assert set(now) & fit <= set(then)
