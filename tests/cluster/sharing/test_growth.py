"""Which nodes are of use where more can be had than there are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sharing.allocate import allocate
from cluster.sharing.demand import Demand, Node
from cluster.sharing.growth import NodeKind, nodes_of_use
from cluster.sharing.ledger import Ledger, Snapshot

CPU = NodeKind("cpu", 4, {"CPU": 4})
GPU = NodeKind("gpu", 3, {"CPU": 8, "GPU": 2}, "H100")
KINDS = (CPU, GPU)


def there(kind: NodeKind, count: int) -> list[Node]:
    return [
        Node(f"{kind.name}-{place}", kind.resources, f"{kind.name}-{place}", kind.accelerator, kind=kind.name)
        for place in range(count)
    ]


def snapshot(
    nodes: list[Node], *demands: Demand, foreign: dict[str, dict[str, float]] | None = None
) -> Snapshot:
    """What a ledger knows once everybody has asked, and holds what was granted."""
    ledger = Ledger("serving", settle_s=0)
    ledger.update_nodes(nodes, foreign)
    for now in range(3):
        for demand in demands:
            grant = ledger.request(demand, float(now))
            ledger.request(replace(demand, held=grant.nodes), float(now))
    return ledger.snapshot(3.0)


def of_use(
    nodes: list[Node], *demands: Demand, unfit: list[Node] | None = None, **more: object
) -> dict[str, int]:
    return nodes_of_use(KINDS, nodes, unfit or [], snapshot(nodes, *demands, **more))


def job(min_: int, max_: int, **unit: float) -> Demand:
    return Demand("job", "training", unit or {"CPU": 2}, min_, max_)


def test_nobody_wants_anything_and_no_node_is_of_use() -> None:
    assert of_use([*there(CPU, 2), *there(GPU, 1)]) == {"cpu": 0, "gpu": 0}


def test_a_minimum_that_has_no_room_wants_so_many_nodes_as_it_fits_on() -> None:
    assert of_use(there(CPU, 1), job(6, 6)) == {"cpu": 3, "gpu": 0}


def test_what_fits_on_what_is_there_wants_no_further_node() -> None:
    assert of_use(there(CPU, 2), job(2, 2)) == {"cpu": 1, "gpu": 0}


def test_wants_go_up_to_what_the_config_allows() -> None:
    assert of_use(there(CPU, 1), job(1, 100, CPU=4)) == {"cpu": 4, "gpu": 3}
    assert of_use(there(GPU, 1), job(1, 100, CPU=1, GPU=1)) == {"cpu": 0, "gpu": 3}


def test_what_no_number_of_nodes_makes_room_for_wants_none() -> None:
    assert of_use(there(CPU, 1), job(7, 7, GPU=1, CPU=1)) == {"cpu": 0, "gpu": 0}
    assert of_use(there(CPU, 1), job(1, 1, GPU=4)) == {"cpu": 0, "gpu": 0}


def test_only_the_kind_that_is_asked_for_will_do() -> None:
    demand = Demand("app", "serving", {"CPU": 4}, 1, 1, accelerator="H100")
    assert of_use(there(CPU, 1), demand) == {"cpu": 0, "gpu": 1}


def test_what_strangers_use_is_counted_beside_it() -> None:
    used = {"cpu-0": {"CPU": 4.0}}
    assert of_use(there(CPU, 1), job(1, 1), foreign=used) == {"cpu": 2, "gpu": 0}


def test_a_node_that_is_still_to_be_looked_at_is_one_less_to_come() -> None:
    nodes = there(CPU, 2)
    assert nodes_of_use(KINDS, nodes, [], snapshot(nodes[:1], job(4, 4))) == {"cpu": 2, "gpu": 0}


def test_nodes_that_are_not_used_are_counted_while_another_has_to_come() -> None:
    nodes = there(CPU, 3)
    unfit, good = nodes[:1], nodes[1:]
    assert of_use(good, job(2, 2), unfit=unfit) == {"cpu": 1, "gpu": 0}
    assert of_use(good, job(6, 6), unfit=unfit) == {"cpu": 4, "gpu": 0}
    avoided = [replace(good[0], avoided=True), good[1]]
    assert of_use(avoided, job(2, 4)) == {"cpu": 3, "gpu": 0}
    # A minimum starts where jobs fail before it waits: nobody needs another node then.
    assert of_use(avoided, job(4, 4)) == {"cpu": 2, "gpu": 0}


@settings(deadline=None)
@given(
    counts=st.tuples(st.integers(0, CPU.most), st.integers(0, GPU.most)),
    asked=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.integers(0, 2)), max_size=4
    ),
)
def test_all_that_is_of_use_can_be_had_and_whoever_waits_has_room_there(
    counts: tuple[int, int], asked: list[tuple[int, int, int, int]]
) -> None:
    nodes = [*there(CPU, counts[0]), *there(GPU, counts[1])]
    demands = [
        Demand(f"job-{place}", "training", {"CPU": cpus, "GPU": gpus}, least, least + more)
        for place, (least, more, cpus, gpus) in enumerate(asked)
    ]
    known = snapshot(nodes, *demands)
    found = nodes_of_use(KINDS, nodes, [], known)
    assert all(0 <= found[kind.name] <= kind.most for kind in KINDS)
    # An oracle: with all the nodes that could ever be had, nobody waits who does not wait with these.
    everything = [*there(CPU, CPU.most), *there(GPU, GPU.most)]
    held = {name: demand.held for name, demand in known.demands.items()}
    best = allocate(everything, [replace(each, held=held[each.holder]) for each in demands], "serving")
    extra = [
        node
        for kind, count in zip(KINDS, counts, strict=True)
        for node in there(kind, kind.most)[count : max(count, found[kind.name])]
    ]
    now = allocate([*nodes, *extra], [replace(each, held=held[each.holder]) for each in demands], "serving")
    waiting = {name for name, grant in now.items() if grant.units < demands[int(name[4:])].min}
    hopeless = {name for name, grant in best.items() if grant.units < demands[int(name[4:])].min}
    assert waiting <= hopeless
