"""What is said about a holder: by example, and never anything that is not so."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ShoalError
from cluster.sharing.demand import Demand, Node
from cluster.sharing.explain import explain
from cluster.sharing.ledger import Ledger


def ledger_of(*cpus: float, **options) -> Ledger:
    ledger = Ledger("serving", **options)
    ledger.update_nodes(
        [Node(f"id{index}", {"CPU": amount}, f"worker-{index}") for index, amount in enumerate(cpus, 1)]
    )
    return ledger


def job(name: str, least: int, most: int, held=(), cpus: float = 1, **more) -> Demand:
    return Demand(f"job/{name}", "training", {"CPU": cpus}, least, most, tuple(held), **more)


def app(name: str, least: int, most: int, held=(), cpus: float = 1) -> Demand:
    return Demand(f"app/{name}", "serving", {"CPU": cpus}, least, most, tuple(held))


def said(ledger: Ledger, holder: str, now: float) -> str:
    return explain(ledger.snapshot(now), holder).text


def test_a_minimum_that_waits_says_what_it_needs_who_has_it_and_where_it_stands():
    ledger = ledger_of(2, 2)
    ledger.request(app("chat", 2, 2, cpus=2), now=0)
    ledger.request(job("first", 1, 1), now=1)
    ledger.request(job("lm", 2, 4), now=2)
    assert said(ledger, "job/lm", 3) == (
        "lm waits: 2 workers of 1 CPU each need a place, each wholly on one node;"
        " worker-1 has 0 CPU free (chat holds 1), worker-2 has 0 CPU free (chat holds 1);"
        " it is 2nd in the queue, behind first"
    )
    assert said(ledger, "job/first", 3).startswith(
        "first waits: 1 worker of 1 CPU needs a place on one node; "
    )
    assert "queue" not in said(ledger, "job/first", 3)
    found = explain(ledger.snapshot(4), "job/lm")
    assert (found.state, found.granted, found.waits_s, found.queue) == ("waiting", 0, 2, ("job/first",))


def test_a_holder_that_gave_way_says_to_whom_and_why():
    ledger = ledger_of(2, 2)
    held = ledger.request(job("lm", 1, 4), now=0).nodes
    ledger.request(app("chat", 1, 1, cpus=2), now=1)
    held = ledger.request(job("lm", 1, 4, held), now=2).nodes
    text = said(ledger, "job/lm", 14)
    assert text.startswith(
        "lm has 2 of at most 4 workers; it gave way to chat (serving goes first) with 2 on worker-2 12 s ago;"
    )
    assert "2 workers of it are still leaving worker-2" in text
    assert said(ledger, "app/chat", 14) == (
        "chat waits: 1 replica of 2 CPU needs a place on one node;"
        " a place is kept for it on worker-2, until what is there has left"
    )
    ledger.request(job("lm", 1, 4, held), now=14)
    ledger.request(app("chat", 1, 1, cpus=2), now=14)
    assert said(ledger, "app/chat", 14) == "chat has all it asked for: 1 replica on worker-2"
    assert "still leaving" not in said(ledger, "job/lm", 14)


def test_a_job_that_settles_says_so():
    ledger = ledger_of(2, settle_s=10)
    ledger.request(app("chat", 1, 1), now=0)
    held = ledger.request(job("lm", 1, 2), now=0).nodes
    ledger.release("app/chat")
    ledger.request(job("lm", 1, 2, held), now=1)
    assert "has 1 of at most 2 workers; it changed a moment ago, and settles" in said(ledger, "job/lm", 2)


def test_what_no_node_could_hold_is_said_to_be_so():
    ledger = ledger_of(2, 2)
    ledger.request(job("large", 1, 1, cpus=3), now=0)
    ledger.request(job("kind", 1, 1, accelerator="H100"), now=0)
    assert "no node that is there has 3 CPU" in said(ledger, "job/large", 1)
    assert "no node with H100 that is there has 1 CPU with H100" in said(ledger, "job/kind", 1)


def test_strangers_are_named_where_they_are_in_the_way():
    ledger = ledger_of(2)
    ledger.update_nodes([Node("id1", {"CPU": 2}, "worker-1")], {"id1": {"CPU": 2}})
    ledger.request(job("lm", 1, 1), now=0)
    assert "worker-1 has 0 CPU free (strangers use 2 CPU)" in said(ledger, "job/lm", 1)


def test_what_is_kept_clear_for_one_that_waited_longer_is_said():
    ledger = ledger_of(2, patience_s=5)
    ledger.request(job("a", 1, 1), now=0)
    ledger.request(job("large", 1, 1, cpus=2), now=0)
    ledger.request(job("a", 1, 1, ["id1"]), now=6)
    ledger.request(job("large", 1, 1, cpus=2), now=6)
    ledger.request(job("small", 1, 1), now=6)
    assert "what is free is kept clear for large, which has waited longer" in said(ledger, "job/small", 7)
    assert "it has waited so long that nothing starts any more" in said(ledger, "job/large", 7)


def test_after_a_restart_everybody_is_heard_first():
    ledger = ledger_of(2, closed_until=3.0)
    ledger.request(job("lm", 1, 1), now=0)
    assert "the broker was restarted a moment ago" in said(ledger, "job/lm", 1)


def test_an_unknown_holder_is_told_who_is_there():
    ledger = ledger_of(2)
    ledger.request(job("lm", 1, 1), now=0)
    with pytest.raises(ShoalError, match="job/x has no lease; these have one: job/lm"):
        said(ledger, "job/x", 1)


def test_holders_of_one_name_are_told_apart():
    ledger = ledger_of(1)
    ledger.request(app("lm", 1, 1), now=0)
    ledger.request(job("lm", 1, 1), now=0)
    assert said(ledger, "job/lm", 1).startswith("job/lm waits")
    assert "app/lm holds 1" in said(ledger, "job/lm", 1)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Ledger, dict[str, Demand], dict[str, float], float]:
    """A ledger after a while, with the demands as their holders said them last, and the nodes' CPUs."""
    cpus = {f"id{index}": draw(st.integers(0, 4)) for index in range(1, draw(st.integers(2, 4)))}
    ledger = Ledger("serving", patience_s=6, settle_s=3)
    ledger.update_nodes([Node(node, {"CPU": amount}, f"worker-{node[2:]}") for node, amount in cpus.items()])
    holders: dict[str, Demand] = {}
    said: dict[str, Demand] = {}
    now = 0.0
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["training", "serving"]))
        least, cpu = draw(st.integers(0, 3)), draw(st.sampled_from([1, 2]))
        gang = draw(st.sampled_from([1, 1, 2])) if kind == "training" else 1
        most = (least + draw(st.integers(0, 2))) * gang
        holders[f"{kind}/h{index}"] = Demand(
            f"{kind}/h{index}", kind, {"CPU": cpu}, least * gang, most, gang=gang
        )
    for _ in range(draw(st.integers(1, 10))):
        now += draw(st.sampled_from([0.5, 4.0]))
        name = draw(st.sampled_from(sorted(holders)))
        said[name] = holders[name]
        grant = ledger.request(said[name], now)
        if draw(st.booleans()):
            holders[name] = replace(holders[name], held=grant.nodes)
    return ledger, said, cpus, now


@settings(max_examples=80, deadline=None)
@given(histories())
def test_nothing_is_said_that_is_not_so(history):
    ledger, holders, cpus, now = history
    rows = {row["holder"]: row for row in ledger.leases(now)}
    snapshot = ledger.snapshot(now)
    # What is taken at the least, by what the holders said and were told.
    used: Counter[str] = Counter()
    for name, row in rows.items():
        for node, count in (Counter(row["nodes"]) | Counter(holders[name].held)).items():
            used[f"worker-{node[2:]}"] += count * holders[name].unit["CPU"]
    for name, row in rows.items():
        found = explain(snapshot, name)
        demand = holders[name]
        waits, complete = row["granted"] < demand.min, row["granted"] >= demand.most
        assert found.state == ("waiting" if waits else "complete" if complete else "partial")
        free = {
            node: float(amount)
            for node, amount in re.findall(r"(worker-\d) has ([\d.]+) CPU free", found.text)
        }
        for node, amount in free.items():
            room = cpus[f"id{node[7:]}"] - used[node]
            assert amount <= max(0, room), (found.text, used)
        for holder, count in re.findall(r"(h\d) holds (\d+)", found.text):
            (owner,) = [each for each in rows if each.endswith(holder)]
            assert int(count) <= max(len(rows[owner]["nodes"]), len(holders[owner].held))
        if match := re.search(r"it is (\d)\w\w in the queue", found.text):
            waiting = [each for each, other in rows.items() if other["granted"] < holders[each].min]
            assert waits
            assert 2 <= int(match[1]) <= len(waiting)
        if "no node" in found.text:
            assert all(amount < demand.unit["CPU"] for amount in cpus.values())
        if match := re.search(r"has (\d+) of at most (\d+)", found.text):
            assert (int(match[1]), int(match[2])) == (row["granted"], demand.most)


def test_units_that_stand_apart_find_no_second_place_on_a_node():
    ledger = ledger_of(4, 4)
    ledger.request(app("chat", 1, 1, cpus=4), now=0)
    ledger.request(job("lm", 2, 2, cpus=2, apart=True), now=1)
    words = said(ledger, "job/lm", 2)
    assert words.startswith("lm waits: 2 workers of 2 CPU each need a place on a node of its own; ")
    assert "worker-2 has 4 CPU free" in words
